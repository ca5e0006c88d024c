// Two attempts at a task side by side. Messages that are the same stand once; in the others, the words that differ are marked.
import { $, apiOf, appendLong, appendText, counted, el, experiment, fetchJson, number, onKeys, pageOf, pill, rewardClass, seconds, setUrl, short, showQuery, signClass, signed, textBlock } from "./common.js";
import { advantageOf, argumentsOf, contentOf, conversation, leavesOf, mainOf, score } from "./chat.js";
import { aligned, wordDifferences } from "./diff.js";

const name = experiment();
const url = new URLSearchParams(location.search);
const sides = ["a", "b"].map((key) => ({ key, id: url.get(key), view: null, leaf: url.has(`path_${key}`) ? Number(url.get(`path_${key}`)) : -1 }));
let attempts = [];
const SHOWN_WORDS = 40;

/** A message as parts that are compared one by one: `[[kind, label, text] …]`. */
function partsOf({ message, call }) {
  const parts = [];
  if (message.reasoning_content) parts.push(["reasoning", "Reasoning", String(message.reasoning_content)]);
  const content = contentOf(message);
  if (content) parts.push(["content", "", content]);
  for (const tool of message.tool_calls || []) parts.push(["tool", String(tool?.function?.name ?? "tool"), argumentsOf(tool)]);
  if (!parts.length) parts.push(["content", "", call && call.run < 0 ? "no reply" : ""]);
  return parts;
}
const roleOf = ({ message, call }) => (call ? "assistant" : message.role || "user");
/** The messages of a side, each with a text that is equal for equal messages. */
const messagesOf = (side) => (side.leaf < 0 ? [] : conversation(side.view.calls, side.leaf).map((part) => ({ ...part, key: JSON.stringify([roleOf(part), part.call?.agent, partsOf(part)]) })));

// ---------------------------------------------------------------- the head of each side

function head(side) {
  const { episode, calls } = side.view;
  const choice = el("select", { "aria-label": `Attempt on the ${side.key === "a" ? "left" : "right"}` });
  const steps = new Map();
  for (const one of attempts) steps.set(one.step, [...(steps.get(one.step) || []), one]);
  if (!attempts.some((one) => one.episode_id === side.id)) choice.append(new Option(side.id, side.id));
  for (const [step, members] of [...steps].reverse()) choice.append(el("optgroup", { label: `step ${step}` }, members.map((one) => new Option(`Attempt ${one.repeat}${one.validation ? " (validation)" : ""}: ${one.reward === null ? one.failure || one.status : `reward ${short(one.reward)}`}`, one.episode_id))));
  choice.value = side.id;
  choice.addEventListener("change", () => { side.id = choice.value; side.leaf = -1; load(); });
  const leaves = leavesOf(calls);
  const path = el("select", { "aria-label": `Conversation on the ${side.key === "a" ? "left" : "right"}` }, leaves.map((call) => new Option(`${call.agent}: to call ${call.index}`, call.index)));
  path.value = side.leaf;
  path.addEventListener("change", () => { side.leaf = Number(path.value); show(); });
  const advantage = advantageOf(calls);
  return el("header", { class: "card pad side-card" },
    el("div", { class: "row wrapping" }, choice, leaves.length > 1 ? path : null, pill(episode.status), el("span", { class: "spring" }), el("a", { href: pageOf(name, "episode", side.id) }, "Open")),
    el("div", { class: "scores" }, score("reward", short(episode.reward), rewardClass(episode.reward)), ...(side.view.has_tokens ? [score("advantage", signed(advantage), signClass(advantage)), score("step", number(side.view.step))] : []), score("calls", number(calls.length)), ...(side.view.has_tokens ? [score("sampled", number(episode.sampled))] : []), score("time", seconds(episode.timings.total))),
    episode.failure ? appendText(el("p", { class: "bad wrap" }), `${episode.failure.kind}: ${episode.failure.message}`) : null);
}

// ---------------------------------------------------------------- messages

function whoNode(part) {
  const who = el("div", { class: "who" }, appendText(el("b"), part.call ? part.call.agent : roleOf(part)));
  if (part.call) who.append(el("span", {}, `call ${part.call.index}`), part.call.run >= 0 ? el("span", {}, `${part.call.tokens} tokens`) : "");
  return who;
}

/** Text in which the words that the other side lacks are marked. */
function marked(pieces, kind) {
  const block = el("div", { class: "text", dir: "auto" });
  for (const [text, same] of pieces) block.append(appendLong(el(same ? "span" : kind === "a" ? "del" : "ins"), text));
  return block;
}

/** A part with its title; `mark`: how the title is marked if the other side has no such part. */
function frame(kind, label, body, mark = "") {
  if (kind === "content") return body;
  return el("div", { class: kind === "tool" ? "toolcall" : "thinking" }, el("div", { class: "part-title" }, appendText(el(mark || "span"), label)), body);
}

/** Both sides of a pair; either may be missing. */
function bubbles(left, right) {
  const parts = [left, right].map((part) => (part ? partsOf(part) : []));
  const rows = aligned(parts[0], parts[1], (x, y) => x[0] === y[0] && x[1] === y[1]);
  const nodes = [el("div", { class: "bubble" }), el("div", { class: "bubble" })];
  for (const [i, j, alike] of rows) {
    const [one, other] = [parts[0][i], parts[1][j]];
    const found = alike ? wordDifferences(one[2], other[2]) : [[[one?.[2], false]], [[other?.[2], false]]];
    if (one) nodes[0].append(frame(one[0], one[1], marked(found[0], "a"), alike ? "" : "del"));
    if (other) nodes[1].append(frame(other[0], other[1], marked(found[1], "b"), alike ? "" : "ins"));
  }
  return [left, right].map((part, index) => (part ? el("article", { class: `message ${roleOf(part)} differs` }, whoNode(part), nodes[index]) : el("div", { class: "nothing" }, "no message here")));
}

function sameNode(part) {
  const body = el("div", { class: "bubble" }, partsOf(part).map(([kind, label, text]) => frame(kind, label, textBlock(text))));
  const words = contentOf(part.message).split(/\s+/).length;
  return el("details", { class: `message same ${roleOf(part)}`, open: words < SHOWN_WORDS }, el("summary", {}, appendText(el("b"), part.call ? part.call.agent : roleOf(part)), el("span", { class: "muted" }, " the same in both")), body);
}

function show() {
  for (const side of sides) if (side.leaf < 0 || !side.view.calls[side.leaf]) side.leaf = mainOf(side.view.calls);
  setUrl(Object.fromEntries(sides.flatMap((side) => [[side.key, side.id], [`path_${side.key}`, side.leaf === mainOf(side.view.calls) ? "" : side.leaf]])));
  $("sides").replaceChildren(...sides.map(head));
  const [left, right] = sides.map(messagesOf);
  const rows = aligned(left, right, (x, y) => x.key === y.key);
  const first = rows.findIndex(([, , same]) => !same);
  $("pairs").replaceChildren(...rows.flatMap(([i, j, same], index) => {
    const divider = index === first ? [el("div", { class: "first-difference", id: "first" }, el("span", {}, "First difference"))] : [];
    if (same) return [...divider, sameNode(left[i])];
    return [...divider, el("div", { class: "pair" }, bubbles(left[i], right[j]))];
  }));
  const count = rows.filter(([, , same]) => !same).length, alike = rows.length - count;
  $("verdict").textContent = !rows.length ? "Neither made a model call." : first < 0 ? `The same, word for word: ${counted(rows.length, "message")}.` : `${counted(alike, "message")} the same, ${number(count)} not; the first difference is in message ${first + 1}${whatDiffers(left[rows[first][0]], right[rows[first][1]])}.`;
  $("to-first").hidden = first < 0;
}

/** In which part two messages differ first. */
function whatDiffers(left, right) {
  if (!left || !right) return ", which only one of them has";
  if (roleOf(left) !== roleOf(right)) return `: ${roleOf(left)} against ${roleOf(right)}`;
  const [a, b] = [partsOf(left), partsOf(right)];
  const at = a.findIndex((part, index) => JSON.stringify(part) !== JSON.stringify(b[index]));
  const [one, other] = [a[at < 0 ? a.length : at], b[at < 0 ? a.length : at]];
  if (one?.[0] === "tool" && other?.[0] === "tool") return one[1] === other[1] ? `: the arguments of ${one[1]}` : `: the tool that is called`;
  if (one?.[0] === "tool" || other?.[0] === "tool") return `: only one calls a tool there`;
  return one?.[0] === "reasoning" || other?.[0] === "reasoning" ? ": the reasoning" : `: what the ${left.call ? "reply" : `${roleOf(left)} message`} says`;
}

// ---------------------------------------------------------------- the page

/** The best and the worst episode of a group. */
async function ofGroup(group) {
  const { rows } = await fetchJson(`${apiOf(name)}/episodes?${new URLSearchParams({ group, order: "asc" })}`);
  if (rows.length < 2) throw new Error(rows.length ? "Only one episode of this group is recorded." : `No episode of a group ${group} is recorded.`);
  const rewarded = rows.filter((row) => row.reward !== null).sort((a, b) => b.reward - a.reward);
  const chosen = rewarded.length > 1 ? rewarded : rows;
  [sides[0].id, sides[1].id] = [chosen[0].episode_id, chosen.at(-1).episode_id];
  setUrl({ group: "" });
}

let turns = 0;
async function load() {
  const turn = ++turns; // an answer that comes after another attempt was chosen is not shown
  delete $("differences-page").dataset.ready;
  try {
    if (url.has("group") && !sides[0].id) await ofGroup(url.get("group"));
    const missing = sides.find((side) => !side.id);
    if (missing) throw new Error(`The address names no episode ${missing.key}: it needs ?a=…&b=…, or ?group=…`);
    const views = await Promise.all(sides.map((side) => fetchJson(`${apiOf(name)}/episode/${encodeURIComponent(side.id)}`)));
    if (!attempts.length) attempts = (await fetchJson(`${apiOf(name)}/task/${encodeURIComponent(views[0].episode.task_id)}`)).attempts;
    if (turn !== turns) return;
    sides.forEach((side, index) => { side.view = views[index]; });
    showQuery(views[0].query || views[0].episode.task_id);
    show();
  } catch (error) { if (turn === turns) $("verdict").textContent = error.message; }
  $("differences-page").dataset.ready = "1";
}

$("to-first").addEventListener("click", () => $("first").scrollIntoView({ block: "start" }));
$("swap").addEventListener("click", () => { const [{ id, leaf }] = sides; Object.assign(sides[0], { id: sides[1].id, leaf: sides[1].leaf }); Object.assign(sides[1], { id, leaf }); load(); });
onKeys({ n: () => $("first")?.scrollIntoView({ block: "start" }) });
await load();
