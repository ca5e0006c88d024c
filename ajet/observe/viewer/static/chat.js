// A conversation: messages with reasoning, tool calls and results.
import { $, el, isLong, mean, oddName, short, signClass, signed, textBlock, appendText } from "./common.js";
import { appendMarkdown } from "./markdown.js";

const isRaw = () => localStorage.getItem("ajet-raw") === "1";

/** What a message says, rendered or as it is. A very long text is shown as it is. */
const said = (text) => (isLong(text) || isRaw() ? textBlock(text) : appendMarkdown(el("div", { class: "text markdown", dir: "auto" }), text));

/** The switch between rendered and raw text; this browser keeps the choice. */
export function rawSwitch(show) {
  const button = $("raw");
  const mark = () => button.setAttribute("aria-pressed", isRaw());
  button.addEventListener("click", () => { localStorage.setItem("ajet-raw", isRaw() ? "0" : "1"); mark(); show(); });
  mark();
}

export function contentOf(message) {
  const content = message.content;
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => part?.text ?? `[${part?.type ?? "part"}]`).join("\n");
  return content === null || content === undefined ? "" : JSON.stringify(content);
}

/** Whether a browser would write the numbers of a JSON text as they stand there. */
const keepsNumbers = (json) => (json.replace(/"(?:[^"\\]|\\.)*"/g, "").match(/-?\d[\d.eE+-]*/g) || []).every((text) => String(Number(text)) === text);

export function argumentsOf(call) {
  const given = call?.function?.arguments;
  if (typeof given !== "string") return JSON.stringify(given, null, 2) ?? "";
  if (!keepsNumbers(given)) return given;
  try {
    const parsed = JSON.parse(given);
    const values = Object.entries(parsed);
    return values.length === 1 && typeof values[0][1] === "string" ? `${values[0][0]}: ${values[0][1]}` : JSON.stringify(parsed, null, 2);
  } catch { return given; }
}

/** The calls that no other call extends: one for each conversation. */
export function leavesOf(calls) {
  const extended = new Set(calls.map((call) => call.extends));
  return calls.filter((call) => !extended.has(call.index));
}

/** The last call of the conversation that is shown first; -1 if there is none. */
export const mainOf = (calls) => (leavesOf(calls).findLast((call) => call.agent === calls[0].agent && !call.drop) ?? calls.at(-1))?.index ?? -1;

/** The mean advantage of the calls that have one. */
export const advantageOf = (calls) => mean(calls.map((call) => call.advantage).filter((value) => value !== null));

/** A figure below its label. */
export const score = (label, value, colour = "") => el("div", {}, el("span", {}, label), el("b", { class: colour }, value));

/** The messages that lead to a call, and its reply: `[{message, call}]`, with `call` for replies only. */
export function conversation(calls, index) {
  const chain = [];
  for (let at = index; at >= 0; at = calls[at].extends) chain.unshift(calls[at]);
  return chain.flatMap((call) => [...call.new_messages.map((message) => ({ message, owner: call })), ...(Object.keys(call.reply).length || call.run >= 0 ? [{ message: call.reply, call, owner: call }] : [])]);
}

export function messageNode({ message, call, owner }, colourOf, { compact = false } = {}) {
  const role = ["system", "user", "assistant", "tool", "developer"].includes(message.role) ? message.role : call ? "assistant" : "user";
  const who = el("div", { class: "who" });
  if (call) {
    who.append(el("i", { class: "dot" }), appendText(el("b"), call.agent), el("span", {}, `call ${call.index}`));
    if (call.advantage !== null) who.append(el("span", { class: signClass(call.advantage), title: "advantage" }, `advantage ${signed(call.advantage)}`));
    if (!compact) {
      if (call.run >= 0) who.append(el("span", {}, `${call.tokens} tokens`));
      if (call.mean_logprob !== null) who.append(el("span", { title: "mean logprob of the sampler" }, `logprob ${short(call.mean_logprob)}`));
    }
    if (!call.trained && (call.run >= 0 || call.drop)) who.append(el("span", { class: "pill" }, (call.drop || (call.trainable ? "masked" : "not trainable")).replaceAll("_", " ")));
    if (call.finish_reason !== "stop") who.append(el("span", { class: "pill warn" }, call.finish_reason));
    if (call.reward !== null) who.append(el("span", { class: "pill accent" }, `reward ${short(call.reward)}`));
  } else who.append(el("b", {}, message.role || role), message.name || message.tool_call_id || "");
  const bubble = el("div", { class: "bubble" });
  if (message.reasoning_content) bubble.append(el("details", { class: "thinking", open: !compact }, el("summary", {}, "Reasoning"), said(String(message.reasoning_content))));
  const content = contentOf(message);
  if (content) bubble.append(role === "tool" ? textBlock(content) : said(content));
  for (const tool of message.tool_calls || []) bubble.append(el("div", { class: "toolcall" }, appendText(el("div"), String(tool?.function?.name ?? "tool")), textBlock(isRaw() && typeof tool?.function?.arguments === "string" ? tool.function.arguments : argumentsOf(tool), "arguments")));
  if (!bubble.childNodes.length) bubble.append(el("span", { class: "muted" }, call && call.run < 0 ? "no reply" : "empty"));
  if (call?.fork && !compact) bubble.prepend(el("div", { class: "forknote" }, el("b", {}, `Forked: ${call.fork.reason.replaceAll("_", " ")}`), appendText(el("span"), call.fork.detail || "")));
  return el("article", { class: `message ${role} ${call ? colourOf(call.agent) : ""}`, "data-call": call ? call.index : undefined, "data-owner": owner.index }, who, bubble);
}

export function conversationText(calls, index) {
  return conversation(calls, index).map(({ message, call }) => {
    const head = call ? `${call.agent} (call ${call.index})` : message.role;
    const tools = (message.tool_calls || []).map((tool) => `→ ${tool?.function?.name}(${typeof tool?.function?.arguments === "string" ? tool.function.arguments : JSON.stringify(tool?.function?.arguments)})`);
    return [`## ${head}`, message.reasoning_content ? `<think>\n${message.reasoning_content}\n</think>` : "", contentOf(message), ...tools].filter(Boolean).join("\n");
  }).join("\n\n");
}

/** The call as a request to an OpenAI-compatible server. */
export function curlOf(view, index) {
  const call = view.calls[index];
  const messages = conversation(view.calls, index).slice(0, -1).map(({ message }) => message);
  const body = { model: call.target, messages };
  if (view.has_tokens) body.temperature = call.sampling.temperature;
  if (view.has_tokens && call.sampling.max_tokens) body.max_tokens = call.sampling.max_tokens;
  if (call.tools >= 0) body.tools = view.toolsets[call.tools];
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''").replace(/[\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (odd) => `\\u${oddName(odd).slice(2).padStart(4, "0").toLowerCase()}`);
  return `curl "$OPENAI_BASE_URL/chat/completions" \\\n  -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\\n  -d '${quoted}'`;
}
