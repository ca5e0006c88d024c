// The list of episodes.
import { $, apiOf, appendText, el, experiment, fetchJson, number, pageOf, pill, rewardClass, seconds, setUrl, short, signClass, signed } from "./common.js";
import { List } from "./list.js";
import { tagNode } from "./notes.js";

const name = experiment();
let notes = {};

function row(one) {
  const link = appendText(el("a", { class: "name", href: pageOf(name, "episode", one.episode_id) }), one.task_id || one.episode_id);
  const note = notes[one.episode_id];
  return el("tr", {},
    el("td", { class: "num" }, one.validation ? el("span", { class: "tag", title: "from a validation" }, "val") : null, " ", number(one.step)),
    el("td", {}, link, note?.note ? el("span", { class: "noted", title: note.note, "aria-label": "has a note" }, "✎") : null, (note?.tags || []).map(tagNode), appendText(el("span", { class: "preview", dir: "auto" }), one.preview)),
    el("td", {}, pill(one.status), one.outcomes.map((outcome) => el("span", { class: "tag" }, ` ${outcome}`)), one.failure ? el("span", { class: "preview" }, one.failure) : null),
    el("td", { class: `num strong ${rewardClass(one.reward)}` }, short(one.reward)),
    el("td", { class: `num ${signClass(one.advantage)}` }, signed(one.advantage)),
    el("td", { class: "num" }, number(one.turns)),
    el("td", {}, one.agents.slice(0, 3).join(", ") + (one.agents.length > 3 ? ` +${one.agents.length - 3}` : "")),
    el("td", {}, one.tag ? el("span", { class: "tag" }, one.tag) : ""),
    el("td", { class: "num" }, number(one.tokens)),
    el("td", { class: "num" }, one.sampled && !one.validation ? `${Math.round(100 * one.trained / one.sampled)} %` : "–"),
    el("td", { class: `num ${one.forks ? "warn" : "muted"}` }, number(one.forks)),
    el("td", { class: "num muted" }, seconds(one.seconds)),
    el("td", { class: "small" }, one.group_id ? [el("a", { href: pageOf(name, "group", one.group_id) }, "Group"), el("br"), el("a", { href: `${pageOf(name, "differences")}?group=${encodeURIComponent(one.group_id)}`, title: "Best and worst of the group side by side" }, "Differences")] : ""));
}

/** An address that asks for nothing opens on the newest step's groups that can teach something. */
async function openNewest() {
  if (location.search || "trajectories" in document.body.dataset) return;
  const { newest, total } = await fetchJson(`${apiOf(name)}/facets`);
  if (!newest) return;
  setUrl({ step_min: newest.step, step_max: newest.step, validation: "no", groups: newest.mixed ? "mixed" : "all" });
  const all = el("button", { class: "more", type: "button", on: { click: () => document.querySelector("#filters [type=reset]").click() } }, `Show all ${number(total)} episodes`);
  $("shown").replaceChildren(newest.mixed ? `Step ${number(newest.step)}, the newest: groups with different rewards, from which the model learns. ` : `Step ${number(newest.step)}, the newest: in each of its groups all rewards are equal, so it teaches nothing. `, all);
  $("shown").hidden = false;
  $("filters").addEventListener("input", () => { $("shown").hidden = true; });
  $("filters").addEventListener("reset", () => { $("shown").hidden = true; });
}

try { await openNewest(); } catch (error) { $("shown").textContent = error.message; $("shown").hidden = false; }
const list = new List({ api: `${apiOf(name)}/episodes`, table: "episodes", row, sort: "id", order: "desc", numbers: ["step_min", "step_max", "reward_min", "reward_max"], noun: ["episode", "episodes"] });

/** The notes of this run. A damaged file of notes leaves the list as it is. */
async function readNotes() {
  try { notes = (await fetchJson(`${apiOf(name)}/notes`)).episodes; } catch { return; }
  const tags = {};
  for (const note of Object.values(notes)) for (const tag of note.tags) tags[`tag:${tag}`] = (tags[`tag:${tag}`] || 0) + 1;
  list.offer("note", tags, (value) => `Tagged ${value.slice(4)}`);
}

await readNotes();
list.load();
list.follow(name, ({ statuses, agents, tags, failures }) => {
  for (const [key, counts] of Object.entries({ status: statuses, agent: agents, tag: tags, failure: failures })) list.offer(key, counts);
});
