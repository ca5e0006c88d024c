// What the reader gave of a task: question, first messages, gold answer, metadata.
import { appendText, el, textBlock } from "./common.js";
import { messageNode } from "./chat.js";

/** Two lists of nodes: what the agent is asked, and what it is not told. */
export function taskCards(task) {
  if (!task.recorded) return [[el("p", { class: "muted" }, "Not recorded.")], givenNodes(task)];
  const asked = [];
  if (task.query) asked.push(textBlock(task.query));
  for (const message of task.init_messages) asked.push(messageNode({ message, owner: { index: -1 } }, () => ""));
  if (!asked.length) asked.push(el("p", { class: "muted" }, "The reader gave neither a question nor messages."));
  return [asked, givenNodes(task)];
}

/** Gold answer and metadata. */
export function givenNodes(task) {
  if (!task.recorded) return [el("p", { class: "muted" }, "Not recorded.")];
  const nodes = [];
  if (task.answer !== null && task.answer !== undefined) nodes.push(el("div", { class: "gold" }, el("span", { class: "muted" }, "Gold answer"), textBlock(typeof task.answer === "string" ? task.answer : JSON.stringify(task.answer, null, 2))));
  if (task.env_type && task.env_type !== "no_env") nodes.push(el("p", { class: "muted" }, `environment ${task.env_type}`));
  if (Object.keys(task.metadata).length) nodes.push(appendText(el("pre", { class: "code", tabindex: "0", "aria-label": "Metadata of the task" }), JSON.stringify(task.metadata, null, 2)));
  return nodes.length ? nodes : [el("p", { class: "muted" }, "Nothing else is recorded about it.")];
}
