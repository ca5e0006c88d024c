// The call tree, drawn like a commit history: one row per call in the order they began, one lane per conversation.
import { appendText, el, signClass, signed } from "./common.js";

const ROW = 46, LANE = 18, LEFT = 20;

/** For each call its lane and its parent (the call it extends, or the one whose prompt it shares). */
export function lanesOf(calls) {
  const lane = [], parent = [], tips = [];
  for (const call of calls) {
    const origin = call.extends >= 0 ? call.extends : call.alternative_to >= 0 ? call.alternative_to : call.fork ? call.fork.nearest : -1;
    const on = call.alternative_to >= 0 ? call.alternative_to : origin;
    parent.push(on);
    const goesOn = call.extends >= 0 && call.alternative_to < 0 && tips[lane[call.extends]] === call.extends;
    if (goesOn) lane.push(lane[call.extends]);
    else {
      let free = tips.findIndex((tip, index) => tip !== undefined && lastUse(calls, tip) < call.index && !lanesBetween(index, on, call.index, lane));
      if (free < 0) free = tips.length;
      lane.push(free);
    }
    tips[lane.at(-1)] = call.index;
  }
  return { lane, parent };
}
/** The last call that branches off a call. */
function lastUse(calls, index) {
  let last = index;
  for (const call of calls) if (call.extends === index || call.alternative_to === index || (call.extends < 0 && call.fork?.nearest === index)) last = Math.max(last, call.index);
  return last;
}
const lanesBetween = (wanted, from, to, lane) => { for (let at = Math.max(0, from); at < to; at++) if (lane[at] === wanted && at > from) return true; return false; };

export function drawGraph(holder, calls, colourOf, select) {
  const { lane, parent } = lanesOf(calls);
  const lanes = Math.min(8, Math.max(0, ...lane) + 1);
  const x = (index) => LEFT + LANE * Math.min(lane[index], 7);
  const y = (index) => ROW * index + ROW / 2;
  const svg = el("svg", { width: LEFT + LANE * lanes, height: ROW * calls.length, "aria-hidden": "true" });
  for (const call of calls) {
    const on = parent[call.index];
    if (on < 0) continue;
    const [x0, y0, x1, y1] = [x(on), y(on), x(call.index), y(call.index)];
    const bend = x0 === x1 ? `M${x0},${y0}V${y1}` : `M${x0},${y0}C${x0},${y0 + ROW * 0.6} ${x1},${y0 + ROW * 0.3} ${x1},${y0 + ROW * 0.85}V${y1}`;
    svg.append(el("path", { d: bend, class: `${colourOf(call.agent)} ${call.fork || call.alternative_to >= 0 ? "fork" : ""}` }));
  }
  for (const call of calls) svg.append(el("circle", { cx: x(call.index), cy: y(call.index), r: 4.5, class: `${colourOf(call.agent)} ${call.trained ? "trained" : ""}` }));
  const rows = calls.map((call) => {
    const why = call.fork ? call.fork.reason : call.alternative_to >= 0 ? `another reply to call ${call.alternative_to}` : "";
    const what = why ? el("span", { class: "what why", title: call.fork?.detail || "" }, why.replaceAll("_", " ")) : appendText(el("span", { class: "what" }), summaryOf(call));
    const worth = call.advantage !== null ? el("span", { class: `worth ${signClass(call.advantage)}` }, signed(call.advantage)) : el("span", { class: "worth muted" }, call.trained || (call.run < 0 && !call.drop) ? "" : (call.drop || (call.trainable ? "masked" : "context")).replaceAll("_", " "));
    const row = el("button", { class: "call", type: "button", "data-call": call.index, on: { click: () => select(call.index) } }, el("span", { class: "who" }, appendText(el("bdi"), call.agent), el("span", { class: "muted" }, ` · ${call.index}`)), worth, what);
    row.style.top = `${ROW * call.index}px`;
    row.style.height = `${ROW}px`;
    row.style.paddingLeft = `${LEFT + LANE * lanes + 2}px`;
    return row;
  });
  holder.style.height = `${ROW * calls.length}px`;
  holder.replaceChildren(...rows, svg);
}

function summaryOf(call) {
  const tools = (call.reply.tool_calls || []).map((tool) => tool?.function?.name).filter(Boolean);
  if (tools.length) return `→ ${tools.join(", ")}`;
  const text = typeof call.reply.content === "string" ? call.reply.content : "";
  return text.replace(/\s+/g, " ").slice(0, 70) || (call.run < 0 ? "no reply" : "");
}

export function markCurrent(holder, index) {
  for (const row of holder.querySelectorAll(".call")) {
    const mine = Number(row.dataset.call) === index;
    row.setAttribute("aria-current", mine);
    if (mine) reveal(row, [holder, holder.parentElement].find((node) => node.scrollHeight > node.clientHeight));
  }
}

/** Scroll a box, and not the page, until a row of it is seen. */
function reveal(row, box) {
  if (!box) return;
  const outer = box.getBoundingClientRect(), inner = row.getBoundingClientRect();
  box.scrollTop += Math.min(0, inner.top - outer.top) + Math.max(0, inner.bottom - outer.bottom);
}
