// One task: what was asked, what the reader gave, and every attempt at it.
import { $, apiOf, appendText, counted, el, experiment, fetchJson, mean, number, pageOf, percent, rewardClass, short, showQuery, spark } from "./common.js";
import { taskCards } from "./taskcard.js";

const name = experiment(), id = $("task").dataset.task;
$("episodes-of").href = `${pageOf(name, "episodes")}?task=${encodeURIComponent(id)}`;

/** Those with a reward: a failed attempt counts in no share and no mean. */
const usable = (attempts) => attempts.filter((one) => one.reward !== null);

/** One step's attempts, each a link to its episode. */
function stepRow({ step, validation, attempts }) {
  const solved = attempts.filter((one) => one.solved).length;
  const rewards = usable(attempts).map((one) => one.reward), earned = mean(rewards);
  const group = attempts.find((one) => one.group_id)?.group_id;
  const sorted = [...attempts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const chip = (one) => el("a", { class: `chip ${one.solved ? "good" : one.reward === null ? "bad" : "plain"}`, href: pageOf(name, "episode", one.episode_id), title: `attempt ${one.repeat}: ${one.failure || one.status}` }, one.reward === null ? one.failure || one.status : short(one.reward));
  // trajectories of agents that ran alone belong to no step
  const between = attempts.length > 1 ? el("a", { href: `${pageOf(name, "differences")}?a=${encodeURIComponent(sorted[0].episode_id)}&b=${encodeURIComponent(sorted.at(-1).episode_id)}` }, "Differences") : "";
  return el("tr", {}, el("td", { class: "num" }, validation ? el("span", { class: "tag" }, "val") : null, " ", number(step)), el("td", { class: "num" }, `${solved} of ${rewards.length}`), el("td", { class: `num ${rewardClass(earned)}` }, short(earned)),
    el("td", {}, el("div", { class: "chips" }, attempts.map(chip))), el("td", { class: "nowrap" }, group ? el("a", { href: pageOf(name, "group", group) }, "Group") : "", " ", between));
}

try {
  const { task, attempts } = await fetchJson(`${apiOf(name)}/task/${encodeURIComponent(id)}`);
  showQuery(task.query || id);
  const [asked, given] = taskCards(task);
  $("asked").replaceChildren(...asked); $("given").replaceChildren(...given);
  const steps = new Map();
  for (const one of attempts) {
    const key = `${one.step} ${one.validation}`;
    if (!steps.has(key)) steps.set(key, { step: one.step, validation: one.validation, attempts: [] });
    steps.get(key).attempts.push(one);
  }
  const solved = attempts.filter((one) => one.solved).length, rewarded = usable(attempts).length, failed = attempts.length - rewarded;
  appendText($("about-task"), `${id} · ${counted(attempts.length, "attempt")}${failed ? ` (${number(failed)} failed)` : ""}${rewarded ? ` · ${percent(solved / rewarded)} solved` : ""}`);
  const ofKind = (validation) => [...steps.values()].filter((one) => one.validation === validation && usable(one.attempts).length).map((one) => one.attempts.filter((attempt) => attempt.solved).length / usable(one.attempts).length);
  const shares = ofKind(false).length ? ofKind(false) : ofKind(true);
  if (shares.length > 1) $("rates").replaceChildren(el("div", { class: "rate" }, el("span", { class: "muted" }, `Solved by step, ${percent(shares[0])} → ${percent(shares.at(-1))}`), spark(shares, `solved by step, ${shares.length} steps`, [0, 1])));
  $("attempts").replaceChildren(el("div", { class: "table-card", tabindex: "0" }, el("table", { class: "list quiet" }, el("thead", {}, el("tr", {}, el("th", { class: "num" }, "Step"), el("th", { class: "num" }, "Solved"), el("th", { class: "num" }, "Mean reward"), el("th", {}, "Attempts"), el("th", {}, el("span", { class: "visually-hidden" }, "Compare")))), el("tbody", {}, [...steps.values()].reverse().map(stepRow)))));
} catch (error) {
  $("about-task").textContent = error.message;
}
$("task").dataset.ready = "1";
