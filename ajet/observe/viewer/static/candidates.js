// The candidates of a search for prompt templates: who came from whom, their texts, and how they did task by task.
import { $, apiOf, appendText, counted, el, experiment, fetchJson, number, poll, seconds, setUrl, short, showLive, signed } from "./common.js";
import { drawCandidate } from "./candidatecard.js";
import { drawFamily } from "./family.js";
import { AT_ONCE, drawScores } from "./taskscores.js";
import { Search } from "./search.js";

const name = experiment(), url = new URLSearchParams(location.search);
const state = { candidate: url.get("candidate") || "", against: url.get("against") || "", whole: url.get("text") === "whole", purpose: url.get("scores") || "", which: url.get("tasks") || "", shown: AT_ONCE };
const PURPOSES = { validation: "Validation", confirmation: "Unseen", batch: "Batches", search: "Search" };
let search = null, stamp = "";

function tiles() {
  const last = search.rounds.at(-1), { confirmed } = search, spent = search.ended?.spent ?? last?.spent;
  const tile = (label, value, small = "") => el("dl", { class: "tile" }, el("dt", {}, label), el("dd", {}, value, small ? el("small", {}, small) : null));
  const found = [];
  if (last) {
    const start = search.meanOf("validation", "c0");
    found.push(tile("Round", `${last.round}${last.rounds ? ` of ${last.rounds}` : ""}`, search.running ? "the next one goes on" : last.partial ? "the budget ended it" : ""), tile("Best", last.best, search.byId.get(last.best)?.made_by || ""));
    found.push(tile("Validation", short(last.score), last.best === "c0" ? "the start" : `start ${short(start)}`));
    found.push(tile("Confirmed", confirmed ? signed(confirmed.gain) : "–", confirmed ? `${short(confirmed.before)} → ${short(confirmed.after)}, ${confirmed.within_noise ? "within noise" : "more than noise"}` : "not yet, or not at all"));
    found.push(tile("Episodes", number(spent.episodes), last.left?.episodes !== undefined ? `${number(last.left.episodes)} left` : ""));
    found.push(tile("Tokens", number(spent.tokens), last.left?.tokens !== undefined ? `${number(last.left.tokens)} left` : ""));
    if (spent.money) found.push(tile("Money", short(spent.money), last.left?.money !== undefined ? `${short(last.left.money)} left` : ""));
    found.push(tile("Time", seconds(spent.seconds), last.left?.seconds !== undefined ? `${seconds(last.left.seconds)} left` : ""));
  }
  $("tiles").replaceChildren(...found);
  const said = [search.started?.algorithm, search.ended?.reason];
  if (search.unfinished) said.push(search.running ? "a round is going on" : "the last round isn't complete: what it found counts for nothing, and a resumed search begins after the round before");
  $("about-search").textContent = said.filter(Boolean).join(" · ");
}

function problems() {
  $("problems").replaceChildren(...search.problems.map((problem) => appendText(el("p", { class: "problem", role: "alert" }), problem)));
}

function empty() {
  const nothing = !search.candidates.length;
  $("found").hidden = nothing;
  $("none").hidden = !nothing;
  $("none").textContent = search.running ? "No candidate yet: they appear with the first episodes." : search.problems.length ? "No candidate can be read from the history." : "No candidate is recorded: this run tunes no prompts, or ended before it began.";
  return nothing;
}

function refused() {
  const box = $("refused"), open = box.open;
  box.hidden = !search.refused.length;
  box.replaceChildren(el("summary", {}, el("h2", {}, counted(search.refused.length, "refused proposal")), el("span", { class: "muted" }, " no episode was spent on them")),
    ...search.refused.slice(-200).reverse().map((one) => el("div", { class: "refusal" }, el("div", {}, el("b", {}, `round ${one.round}`), el("span", { class: "muted" }, ` ${one.kind} of ${one.parents.join(", ")}: `), appendText(el("span", { class: "wrap" }), one.reason)), ...Object.values(one.texts).map((text) => appendText(el("div", { class: "text template", dir: "auto" }), text.slice(0, 2000))))));
  box.open = open;
}

function purposes() {
  $("purposes").replaceChildren(...search.purposes.map((purpose) => el("button", { type: "button", "aria-pressed": String(purpose === state.purpose), on: { click: () => { Object.assign(state, { purpose, shown: AT_ONCE }); setUrl({ scores: purpose === "validation" ? "" : purpose }); draw(); } } }, PURPOSES[purpose])));
}

function draw() {
  problems();
  tiles();
  if (empty()) return;
  const chosen = search.byId.get(state.candidate) || search.byId.get(search.bestId) || search.candidates[0];
  const against = search.byId.get(state.against) || search.parentOf(chosen);
  if (!search.purposes.includes(state.purpose)) state.purpose = search.purposes[0] || "";
  const select = (candidate) => { Object.assign(state, { candidate, against: "" }); setUrl({ candidate, against: "" }); draw(); };
  drawFamily($("family"), search, chosen.id, select);
  const validated = search.candidates.filter((one) => search.trialsOf("validation", one.id).size).length;
  $("tree-summary").textContent = `${counted(search.candidates.length, "candidate")}, ${number(validated)} validated`;
  drawCandidate($("candidate"), {
    name, search, one: chosen, against: against?.id === chosen.id ? null : against, whole: state.whole, select,
    compare: (id) => { state.against = id; setUrl({ against: id }); draw(); },
    show: (whole) => { state.whole = whole; setUrl({ text: whole ? "whole" : "" }); draw(); },
  });
  purposes();
  $("which").value = state.which;
  const { rows, tasks, columns } = drawScores($("scores"), { name, search, purpose: state.purpose, which: state.which, chosen: chosen.id, against, shown: state.shown, select, more: (shown) => { state.shown = shown; draw(); } });
  $("scores-summary").textContent = `${rows === tasks ? counted(tasks, "task") : `${number(rows)} of ${counted(tasks, "task")}`}, ${counted(columns, "candidate")}`;
  refused();
}

$("which").addEventListener("change", () => { Object.assign(state, { which: $("which").value, shown: AT_ONCE }); setUrl({ tasks: state.which }); draw(); });
poll(3, async () => {
  const found = await fetchJson(`${apiOf(name)}/candidates?known=${encodeURIComponent(stamp)}`);
  showLive(found.running);
  stamp = found.stamp;
  if (found.candidates) {
    const first = search === null;
    search = new Search(found);
    const version = url.get("version");
    if (first && version && !state.candidate) state.candidate = search.candidates.find((one) => one.version === version)?.id || "";
    draw();
  }
  $("candidates-page").dataset.ready = "1";
});
