// One candidate: its texts and what changed in them, what led to it, and how it did.
import { appendLong, appendText, copy, el, number, pageOf, short, textBlock } from "./common.js";
import { unified } from "./diff.js";

const LED = {
  start: "These are the templates as they were given.",
  rewrite: "Written anew, without looking at any episode.",
  merge: "Each template is that of one of its parents; nothing was written for it.",
};
const FEEDBACK = { edit: "The criticism that it answers", reflect: "The feedback that it was written from" };
const TRIED = { validation: "all validation tasks", confirmation: "unseen tasks", batch: "batches of validation tasks", search: "search tasks, to be read" };

const choice = (search, id, select) => (search.byId.has(id) ? el("button", { class: "more", type: "button", on: { click: () => select(id) } }, id) : el("span", {}, id));

/** Links to the episodes behind a trial; the first says what came of it. */
export function episodeLinks(name, trial) {
  const worth = trial.fault ? "fault" : trial.failure && trial.reward === null ? "failed" : short(trial.reward);
  const about = [trial.failure, trial.episodes.length ? "" : "its episode isn't recorded"].filter(Boolean).join("; ");
  if (!trial.episodes.length) return [el("span", { class: "worth", title: about }, worth)];
  return trial.episodes.map((id, index) => el("a", { href: pageOf(name, "episode", id), title: about || `episode ${id}` }, index ? ` ${index + 1}` : worth));
}

function textsNode(search, one, against, whole) {
  return Object.entries(one.templates).map(([key, { text }]) => {
    const before = against?.templates[key]?.text;
    const block = el("div", { class: "text template", dir: "auto" });
    if (whole || before === undefined) appendLong(block, text);
    else for (const [piece, kind] of unified(before, text)) block.append(appendLong(el({ same: "span", gone: "del", fresh: "ins" }[kind]), piece));
    const same = before === text ? el("span", { class: "muted" }, ` the same as in ${against.id}`) : null;
    return el("div", {}, el("div", { class: "row template-head" }, appendText(el("h3"), key), same, el("span", { class: "spring" }), el("button", { class: "more", type: "button", on: { click: () => copy(text, "Template") } }, "Copy")), block);
  });
}

function readNode(name, search, one) {
  if (!one.read.length) return null;
  const rows = one.read.map((trial) => el("tr", {}, el("td", {}, appendText(el("a", { href: pageOf(name, "task", taskOf(trial.task)) }), trial.task)), el("td", { class: "num" }, episodeLinks(name, trial)), el("td", { class: "wrap" }, appendLong(el("div", { class: "text", dir: "auto" }), trial.feedback || trial.failure || "–"))));
  return el("div", {}, el("h3", {}, `Episodes that were read (${one.read.length})`), el("div", { class: "table-card" }, el("table", { class: "list quiet read" }, el("thead", {}, el("tr", {}, el("th", {}, "Task"), el("th", { class: "num" }, "Reward"), el("th", {}, "What was said about it"))), el("tbody", {}, rows))));
}

/** Of two tasks with one id the second is searched with as `id~2`; its episodes have the id. */
export const taskOf = (task) => task.replace(/~\d+$/, "");

function scoresNode(search, one, against) {
  const rows = search.purposes.filter((purpose) => search.trialsOf(purpose, one.id).size).map((purpose) => {
    const tasks = search.trialsOf(purpose, one.id), { better, worse, same } = against ? search.against(purpose, one.id, against.id) : {};
    const compared = against && better + worse + same ? `against ${against.id}: ${better} better, ${worse} worse, ${same} the same` : "";
    const solved = [...tasks.values()].filter((trials) => trials.every((trial) => trial.success >= 0.5)).length;
    return el("div", {}, el("b", {}, short(search.meanOf(purpose, one.id))), el("div", {}, `${TRIED[purpose]}: ${number(tasks.size)}, ${number(solved)} solved`, compared ? el("div", { class: "muted" }, compared) : null));
  });
  return rows.length ? el("div", { class: "tried" }, rows) : el("p", { class: "muted" }, "It hasn't been tried yet.");
}

/** `against`: the candidate that it is compared with; null for none. */
export function drawCandidate(box, { name, search, one, against, whole, select, compare, show }) {
  const parents = one.parents.flatMap((id, index) => [index ? " and " : "", choice(search, id, select)]);
  const children = (search.children.get(one.id) || []).flatMap((child, index) => [index ? ", " : "", choice(search, child.id, select)]);
  const others = search.candidates.filter((other) => other.id !== one.id);
  const picker = el("select", { "aria-label": "Compared with", on: { change: (event) => compare(event.target.value) } }, others.map((other) => el("option", { value: other.id, selected: other.id === against?.id }, `against ${other.id}`)));
  const toggle = (label, value) => el("button", { type: "button", "aria-pressed": String(whole === value), on: { click: () => show(value) } }, label);
  const refused = search.refused.filter((two) => two.parents.includes(one.id)).length;
  const head = el("div", { class: "row wrapping candidate-head" }, el("h2", {}, one.id), one.id === search.bestId ? el("span", { class: "pill good" }, "best") : null, one.unfinished ? el("span", { class: "pill warn" }, "its round isn't complete") : null,
    el("span", { class: "sub" }, one.made_by === "start" ? "the start" : `${one.made_by}, round ${one.round}`, parents.length ? " from " : "", parents, children.length ? "; led to " : "", children, refused ? `; ${refused} refused` : "", " · ", el("span", { class: "mono" }, `version ${one.version}`)));
  const said = one.feedback && !LED[one.made_by] ? [el("h3", {}, FEEDBACK[one.made_by] || "What led to it"), textBlock(one.feedback)] : [el("p", { class: "muted" }, LED[one.made_by] || "What led to it isn't recorded.")];
  const scroll = box.dataset.shown === one.id ? box.scrollTop : 0;
  box.dataset.shown = one.id;
  box.replaceChildren(head, scoresNode(search, one, against),
    el("div", { class: "row wrapping" }, el("div", { class: "segments" }, toggle("Changes", false), toggle("Text", true)), others.length ? picker : null),
    ...textsNode(search, one, against, whole), el("div", { class: "led" }, ...said), readNode(name, search, one) ?? "");
  box.scrollTop = scroll;
}
