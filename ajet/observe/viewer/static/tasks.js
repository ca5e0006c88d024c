// The list of tasks: how often each was solved, and how that changed over the steps.
import { $, apiOf, appendText, el, experiment, number, pageOf, percent, short, signClass, spark } from "./common.js";
import { List } from "./list.js";

const name = experiment();

/** A gold answer in one line. */
const answerText = (answer) => answer === null || answer === undefined ? "–" : typeof answer === "string" ? answer : JSON.stringify(answer);

function row(one) {
  const link = appendText(el("a", { class: "name", href: pageOf(name, "task", one.task_id) }), one.task_id);
  const shares = one.by_step.map(([, share]) => share);
  const trend = spark(shares, `${one.task_id} solved by step: ${percent(shares[0] ?? null)} to ${percent(shares.at(-1) ?? null)}`, [0, 1]);
  return el("tr", {},
    el("td", {}, link, appendText(el("span", { class: "preview", dir: "auto" }), one.preview)),
    el("td", {}, one.tag ? el("span", { class: "tag" }, one.tag) : ""),
    el("td", {}, appendText(el("span", { class: "preview short", dir: "auto", title: answerText(one.answer) }), answerText(one.answer).slice(0, 200))),
    el("td", { class: "num" }, number(one.attempts), one.failed ? el("span", { class: "muted" }, ` (${number(one.failed)} failed)`) : null), el("td", { class: "num strong" }, percent(one.solved)),
    el("td", { class: "spark-cell", title: one.by_step.slice(-20).map(([step, share]) => `step ${step}: ${percent(share)}`).join("\n") }, trend),
    el("td", { class: "num" }, percent(one.latest)),
    el("td", { class: `num ${signClass(one.change)}` }, one.change ? `${one.change > 0 ? "+" : "−"}${percent(Math.abs(one.change))}` : "–"),
    el("td", { class: "num" }, short(one.reward)), el("td", { class: "num muted" }, number(one.last_step)));
}

const share = (text) => (text === "" || text === undefined ? "" : Number(text) / 100);
const list = new List({
  api: `${apiOf(name)}/tasks`, table: "tasks", row, sort: "task_id", order: "asc", numbers: ["solved_min", "solved_max"], noun: ["task", "tasks"],
  outgoing: (values) => ({ ...values, solved_min: share(values.solved_min), solved_max: share(values.solved_max) }),
});
list.load();
list.follow(name, ({ tags }) => list.offer("tag", tags));
