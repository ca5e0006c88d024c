// One episode: conversation, call tree, tokens, details. The URL records what is shown.
import { $, agentColours, apiOf, appendText, clock, copy, copyLink, counted, el, experiment, fetchAnswer, fetchJson, number, onKeys, pageOf, pill, rewardClass, seconds, setUrl, short, showQuery, signClass, signed, toast } from "./common.js";
import { advantageOf, conversation, conversationText, curlOf, leavesOf, mainOf, messageNode, rawSwitch } from "./chat.js";
import { drawGraph, markCurrent } from "./graph.js";
import { showNote } from "./notes.js";
import { givenNodes } from "./taskcard.js";
import { drawTimeline } from "./timeline.js";
import { TokenView } from "./tokens.js";

const name = experiment(), id = $("episode").dataset.episode;
const url = new URLSearchParams(location.search);
const state = { view: ["chat", "tokens", "timeline", "details"].includes(url.get("view")) ? url.get("view") : "chat", call: url.has("call") ? Number(url.get("call")) : -1, colour: url.get("colour") || "trained", token: url.has("at") ? Number(url.get("at")) : -1 };
let view, colourOf, tokens = null, loading = null;

/** The conversation in which a call is shown, given by the last call that continues it. */
function leafOf(index) {
  let at = index;
  for (let next = at; next !== undefined;) { at = next; next = view.calls.find((call) => call.extends === at)?.index; }
  return at;
}
const onPath = (leaf, index) => { for (let at = leaf; at >= 0; at = view.calls[at].extends) if (at === index) return true; return false; };

// ---------------------------------------------------------------- side

function facts() {
  const { episode } = view;
  $("status").replaceChildren(pill(episode.status), " ", ...episode.outcomes.map((outcome) => el("span", { class: "pill warn" }, outcome)), view.validation ? el("span", { class: "pill accent" }, "validation") : "");
  showQuery(view.query || episode.task_id, $("title"));
  $("ids").replaceChildren(appendText(el("a", { href: pageOf(name, "task", episode.task_id) }), episode.task_id), ` · ${episode.id}`);
  const entry = (label, value, colour = "") => [el("div", {}, el("dt", {}, label), el("dd", { class: colour }, value))];
  const mean = advantageOf(view.calls);
  if (!view.has_tokens && view.calls.length) {  // messages of an agent that ran alone
    const { input_tokens: input, output_tokens: output, cost } = episode.metadata;
    const whole = (value) => (typeof value === "number" ? number(value) : "–");
    $("facts").replaceChildren(
      ...entry("Reward", short(episode.reward), rewardClass(episode.reward)), ...entry("Success", episode.success === null ? "–" : episode.success ? "yes" : "no"), ...entry("Episode", episode.group_id ? el("a", { href: pageOf(name, "group", episode.group_id) }, `${episode.repeat} of group`) : number(episode.repeat)),
      ...entry("Input tokens", whole(input)), ...entry("Output tokens", whole(output)), ...entry("Time", seconds(episode.timings.total)), ...(typeof cost === "number" ? entry("Cost", number(cost)) : []));
  } else $("facts").replaceChildren(
    ...entry("Reward", short(episode.reward), rewardClass(episode.reward)), ...entry("Advantage", signed(mean), signClass(mean)), ...entry("Success", episode.success === null ? "–" : episode.success ? "yes" : "no"),
    ...entry("Step", number(view.step)), ...entry("Episode", episode.group_id ? el("a", { href: pageOf(name, "group", episode.group_id) }, `${episode.repeat} of group`) : number(episode.repeat)), ...entry("Time", seconds(episode.timings.total)),
    ...entry("Tokens", number(episode.tokens)), ...entry("Sampled", number(episode.sampled)), ...entry("Trained", view.validation ? "–" : number(episode.trained)));
  for (const [button, target] of [["before", view.before], ["after", view.after]]) {
    if (target) $(button).href = pageOf(name, "episode", target) + (state.view === "chat" ? "" : `?view=${state.view}`);
    else $(button).setAttribute("aria-disabled", "true");
  }
  const forks = view.calls.filter((call) => call.fork).length;
  $("tree-summary").textContent = [[view.calls.length, "call"], [leavesOf(view.calls).length, "conversation"], [forks, "fork"]].filter(([count]) => count).map(([count, noun]) => counted(count, noun)).join(", ");
}

// ---------------------------------------------------------------- views

function showChat() {
  const box = $("view-chat");
  box.replaceChildren();
  const { failure } = view.episode;
  if (failure) box.append(el("div", { class: "failure" }, el("b", {}, failure.kind), el("div", { class: "wrap" }, failure.message), failure.traceback ? el("pre", {}, failure.traceback) : null));
  if (state.leaf >= 0) {
    box.append(...conversation(view.calls, state.leaf).map((part) => messageNode(part, colourOf)));
    const current = box.querySelector(`[data-call="${state.call}"]`);
    if (current && state.chosen) { current.classList.add("current"); current.scrollIntoView({ block: "center" }); }
  } else box.append(el("p", { class: "empty" }, "No model calls were made."));
}

async function showTokens() {
  if (!view.has_tokens) { $("view-tokens").replaceChildren(el("p", { class: "empty" }, view.calls.length ? "Only messages were recorded, no tokens." : "No model calls were made.")); return; }
  loading ??= fetchJson(`${apiOf(name)}/tokens/${encodeURIComponent(id)}`);
  const data = await loading;
  tokens ??= new TokenView($("view-tokens"), view, data, { colour: state.colour, onColour: (colour) => { state.colour = colour; setUrl({ colour: colour === "trained" ? "" : colour }); }, onToken: (token) => { state.token = token; setUrl({ at: token }); } });
  tokens.show(state.leaf, state.token);
  if (state.token < 0) tokens.toCall(state.call);
  $("view-tokens").dataset.ready = "1";
}

function showDetails() {
  const { episode } = view;
  const plain = (values) => Object.fromEntries(Object.entries(values).map(([key, value]) => [key, String(value)]));
  const pairs = (values) => el("dl", { class: "kv" }, Object.entries(values).flatMap(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, typeof value === "number" ? short(value) : String(value))]));
  const card = (title, ...content) => el("section", { class: "card" }, el("h2", {}, title), ...content);
  const json = (value) => el("pre", { tabindex: "0" }, JSON.stringify(value, null, 2));
  const ledger = { [view.validation ? "kept (a validation trains nothing)" : "trained"]: episode.ledger.trained, ...prefixed("masked", episode.ledger.masked), ...prefixed("dropped", episode.ledger.dropped) };
  const bar = el("div", { class: "bar" }, Object.values(ledger).map((count, index) => { const part = el("i", { class: `a${(index + 2) % 8}` }); part.style.width = `${100 * count / (episode.ledger.captured || 1)}%`; return part; }));
  const shares = el("dl", { class: "kv" }, Object.entries(ledger).flatMap(([key, count], index) => [el("dt", {}, el("i", { class: `dot a${(index + 2) % 8}` }), key), el("dd", {}, number(count))]));
  const call = view.calls[state.call];
  const parts = Object.fromEntries(Object.entries(episode.reward_parts).map(([name, value]) => [name, `${short(value)} × ${short(episode.reward_weights[name] ?? 1)}`]));
  const judged = episode.metadata.judge;
  const cards = [
    card("Task", ...givenNodes(view.task), el("p", {}, el("a", { href: pageOf(name, "task", episode.task_id) }, "All attempts at it"))),
    ...(Object.keys(parts).length ? [card(`Reward ${short(episode.reward)}: parts × weights`, pairs(parts))] : []),
    ...(judged ? [card("What the judge said", json(judged))] : []),
    ...(view.has_tokens ? [card(`Ledger: ${number(episode.ledger.captured)} tokens sampled`, bar, shares)] : []),
    card("Times", pairs(Object.fromEntries(Object.entries(episode.timings).map(([key, value]) => [key, seconds(value)])))),
    card("Episode", pairs({ task: episode.task_id, group: episode.group_id || "–", tag: episode.tag || "–", attempts: episode.attempts, recorded: clock(view.recorded), ...(episode.prompt_version ? { "templates, version": episode.prompt_version, "templates asked for": episode.prompts_used?.join(", ") || (episode.prompts_used ? "none" : "not known") } : {}), ...Object.fromEntries(Object.entries(episode.agent_rewards).map(([agent, reward]) => [`reward of ${agent}`, reward])) }), ...candidateLink(episode.prompt_version)),
  ];
  if (call) cards.push(card(`Call ${call.index}: ${call.agent}`, pairs({ target: call.target, turn: call.turn, "prompt tokens": number(call.prompt_tokens), ...(view.has_tokens ? { "sampled tokens": number(call.tokens), versions: call.versions.map(([, version]) => version).join(", ") || "–" } : {}), "finish reason": call.finish_reason, began: seconds(call.started_s), took: seconds(call.seconds) })));
  if (call && view.has_tokens) cards.push(card("Sampling of this call", pairs(plain(Object.fromEntries(Object.entries(call.sampling).filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length)))))));
  if (call?.fork) cards.push(card("Why it forked", pairs({ reason: call.fork.reason, "nearest call": call.fork.nearest, detail: call.fork.detail || "–", "tokens repeated": number(call.fork.tokens) })));
  if (call && view.has_tokens) cards.push(card("Credit", call.entries.length ? pairs(Object.fromEntries(call.entries.map(([advantage, weight], index) => [`entry ${index}: advantage, weight`, `${signed(advantage)}, ${short(weight)}`]))) : el("p", { class: "muted" }, noCredit())));
  const { judge: _, ...metadata } = episode.metadata;
  if (Object.keys(metadata).length) cards.push(card("Metadata", json(metadata)));
  if (Object.keys(episode.log_metrics).length) cards.push(card("Logged by the workflow", json(episode.log_metrics)));
  if (call && call.tools >= 0) cards.push(card("Tools of this call", json(view.toolsets[call.tools])));
  $("view-details").replaceChildren(el("div", { class: "grid" }, cards));
}
/** Where the templates of an episode of a search came from. */
function candidateLink(version) {
  const page = document.querySelector(".tabs a[href$='/candidates']");
  return version && page ? [el("p", {}, el("a", { href: `${page.getAttribute("href")}?version=${encodeURIComponent(version)}` }, "The candidate with these templates"))] : [];
}
/** Why a call has no advantage. */
function noCredit() {
  if (view.validation) return "None: a validation doesn't train.";
  return "None recorded. Usually all episodes of its group earned the same reward, or the call was left out (see the ledger).";
}
const prefixed = (word, counts) => Object.fromEntries(Object.entries(counts).map(([reason, count]) => [`${word}: ${reason.replaceAll("_", " ")}`, count]));

// ---------------------------------------------------------------- the selection

function paths() {
  const options = leavesOf(view.calls).map((call) => el("option", { value: call.index }, `${call.agent}: to call ${call.index}${call.drop ? ` (${call.drop.replaceAll("_", " ")})` : ""}`));
  $("path").replaceChildren(...options);
  $("path").parentElement.hidden = options.length < 2;
}

function show() {
  if (!view) return;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const mine = tab.dataset.view === state.view;
    tab.setAttribute("aria-selected", mine);
    tab.tabIndex = mine ? 0 : -1;
    $(`view-${tab.dataset.view}`).hidden = !mine;
  }
  $("raw").hidden = state.view !== "chat";
  $("path").value = state.leaf;
  markCurrent($("graph"), state.call);
  if (state.view === "chat") showChat();
  else if (state.view === "tokens") showTokens().catch((error) => { $("view-tokens").textContent = error.message; });
  else if (state.view === "timeline") drawTimeline($("view-timeline"), view, colourOf, (call) => { state.view = "chat"; setUrl({ view: "" }); select(call); });
  else showDetails();
}

function select(index) {
  const leaf = onPath(state.leaf, index) ? state.leaf : leafOf(index);
  Object.assign(state, { call: index, leaf, token: -1, chosen: true });
  setUrl({ call: index, at: "" });
  show();
}

function choose(next) { state.view = next; setUrl({ view: next === "chat" ? "" : next }); show(); }

for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => choose(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    const all = [...document.querySelectorAll("[role=tab]")], step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { const next = all[(all.indexOf(tab) + step + all.length) % all.length]; next.focus(); choose(next.dataset.view); }
  });
}
rawSwitch(show);
$("path").addEventListener("change", () => { state.leaf = -1; select(Number($("path").value)); });
$("copies").addEventListener("click", async (event) => {
  const what = event.target.dataset?.copy;
  if (what === "link") copyLink();
  else if (what === "text") copy(conversationText(view.calls, state.leaf), "Conversation");
  else if (what === "json") { toast("Fetching…"); copy(await (await fetchAnswer(`${apiOf(name)}/raw/${encodeURIComponent(id)}`)).text(), "Episode as JSON"); }
  else if (what === "curl") copy(curlOf(view, state.call), "curl command");
});
const follow = (link) => link.href && link.click();
onKeys({ j: () => follow($("after")), k: () => follow($("before")) });

try {
  view = await fetchJson(`${apiOf(name)}/episode/${encodeURIComponent(id)}`);
  colourOf = agentColours(view.calls.map((call) => call.agent));
  state.chosen = state.call >= 0 && state.call < view.calls.length;
  if (!state.chosen) state.call = mainOf(view.calls);
  state.leaf = view.calls.length ? leafOf(state.call) : -1;
  $("tab-tokens").hidden = !view.has_tokens && view.calls.length > 0;
  facts();
  showNote($("note"), name, id);
  paths();
  drawGraph($("graph"), view.calls, colourOf, select);
  show();
} catch (error) {
  $("view-chat").append(el("p", { class: "empty", role: "alert" }, error.message));
}
$("episode").dataset.ready = "1";
