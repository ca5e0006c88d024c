// Scores by task: which tasks one candidate solves and another doesn't.
import { appendText, el, number, pageOf, short } from "./common.js";
import { episodeLinks, taskOf } from "./candidatecard.js";
import { meanOfTrials } from "./search.js";

const AT_ONCE = 50;

function cell(name, trials, highest, chosen) {
  const value = trials ? meanOfTrials(trials) : null;
  const node = el("td", { class: `num heat ${chosen ? "chosen" : ""} ${trials ? "" : "untried"}` }, trials ? trials.flatMap((trial, index) => [index ? " · " : "", ...episodeLinks(name, trial)]) : "");
  if (value !== null) node.style.setProperty("--share", Math.max(0, Math.min(1, value / highest)));
  if (trials?.some((trial) => trial.failure)) node.classList.add("failed");
  return node;
}

function wanted(which, values, own, parents) {
  const known = values.filter((value) => value !== null);
  if (which === "differ") return new Set(known).size > 1;
  if (which === "parent") return own !== null && parents !== null && own !== parents;
  return true;
}

/** `chosen`: the candidate that is looked at; `shown`: how many tasks at most. */
export function drawScores(holder, { name, search, purpose, which, chosen, against, shown, select, more }) {
  const columns = search.candidates.filter((one) => search.trialsOf(purpose, one.id).size);
  const tasks = [...new Set(columns.flatMap((one) => [...search.trialsOf(purpose, one.id).keys()]))];
  const order = search.started?.tasks?.[purpose === "batch" ? "validation" : purpose] || [];
  const at = new Map(order.map((task, index) => [task, index]));
  tasks.sort((a, b) => (at.get(a) ?? Infinity) - (at.get(b) ?? Infinity));
  const value = (task, id) => meanOfTrials(search.trialsOf(purpose, id).get(task) || []);
  const solves = (task, one) => (search.trialsOf(purpose, one.id).get(task) || []).some((trial) => trial.success >= 0.5);
  const rows = tasks.filter((task) => which === "unsolved" ? !columns.some((one) => solves(task, one)) : wanted(which, columns.map((one) => value(task, one.id)), value(task, chosen), against ? value(task, against.id) : null));
  const highest = Math.max(0, ...columns.flatMap((one) => tasks.map((task) => value(task, one.id) ?? 0))) || 1;
  const head = el("tr", {}, el("th", { class: "task-head" }, "Task"), el("th", { class: "num", title: "candidates that solve it, of those that tried" }, "Solved by"), columns.map((one) => el("th", { class: `num ${one.id === chosen ? "chosen" : ""}` }, el("button", { class: "more", type: "button", "aria-label": `Look at ${one.id}`, on: { click: () => select(one.id) } }, one.id), one.id === search.bestId ? el("span", { class: "good", title: "the best" }, " ★") : null, el("div", { class: "muted" }, short(search.meanOf(purpose, one.id))))));
  const body = rows.slice(0, shown).map((task) => {
    const tried = columns.filter((one) => search.trialsOf(purpose, one.id).has(task));
    return el("tr", {}, el("td", { class: "task-head" }, appendText(el("a", { href: pageOf(name, "task", taskOf(task)) }), task), appendText(el("span", { class: "preview", dir: "auto", title: (search.started?.queries[task] || "").slice(0, 500) }), (search.started?.queries[task] || "").slice(0, 200))),
      el("td", { class: "num" }, `${number(tried.filter((one) => solves(task, one)).length)} of ${number(tried.length)}`), columns.map((one) => cell(name, search.trialsOf(purpose, one.id).get(task), highest, one.id === chosen)));
  });
  const place = [holder.scrollLeft, holder.scrollTop];
  holder.replaceChildren(el("table", { class: "list quiet matrix" }, el("thead", {}, head), el("tbody", {}, body)));
  if (!rows.length) holder.append(el("p", { class: "empty" }, which === "unsolved" ? "Each of these tasks is solved by some candidate." : "No such tasks."));
  if (rows.length > shown) holder.append(el("button", { class: "button more-tasks", type: "button", on: { click: () => more(shown + AT_ONCE) } }, `Show ${number(Math.min(AT_ONCE, rows.length - shown))} more tasks`));
  [holder.scrollLeft, holder.scrollTop] = place;
  return { rows: rows.length, tasks: tasks.length, columns: columns.length };
}
export { AT_ONCE };
