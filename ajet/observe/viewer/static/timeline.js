// What happened in an episode, by time: model calls, tools, environment steps and spans, one row for each.
import { appendText, counted, el, seconds, short, textBlock } from "./common.js";

const KINDS = { call: "model call", tools: "tools", environment: "environment", span: "span" };
const precise = (value) => (value < 0.001 ? "< 1 ms" : value < 1 ? `${Math.round(1000 * value)} ms` : seconds(value));

function facts(entry) {
  const known = Object.entries(entry.facts || {}).filter(([, value]) => value !== null && value !== "");
  if (!known.length) return el("p", { class: "muted" }, "Nothing more is recorded.");
  return el("dl", { class: "kv wide" }, known.flatMap(([name, value]) => [appendText(el("dt"), name), el("dd", {}, typeof value === "string" ? textBlock(value) : typeof value === "number" ? short(value) : textBlock(JSON.stringify(value, null, 2)))]));
}

/** The width that a long wait is drawn with, as a share of the whole. */
const CUT = 0.05;

/** From seconds to a share of the width. One wait that is longer than all the rest is drawn short, and said. */
function scaleOf(timed, start, end) {
  let busy = start, cut = { from: start, to: start };
  for (const entry of [...timed].sort((a, b) => a.start - b.start)) {
    if (entry.start - busy > cut.to - cut.from) cut = { from: busy, to: entry.start };
    busy = Math.max(busy, entry.start + entry.seconds);
  }
  if (cut.to - cut.from < (end - start) / 2) cut = { from: start, to: start };
  const waited = cut.to - cut.from, width = waited ? CUT : 0, rest = Math.max(0.001, end - start - waited) / (1 - width);
  const at = (time) => time <= cut.from ? (time - start) / rest : time >= cut.to ? width + (time - start - waited) / rest : (cut.from - start) / rest + width * (time - cut.from) / waited;
  /** The time at a share of the width; null within the wait. */
  const time = (share) => share <= at(cut.from) ? start + share * rest : share >= at(cut.to) ? start + waited + (share - width) * rest : null;
  return { at, time, cut, waited, shown: end - start - waited };
}

/** The wait that is drawn short, in one row. */
function gap(scale) {
  if (!scale.waited) return null;
  const mark = el("u");
  mark.style.left = `${100 * scale.at(scale.cut.from)}%`;
  mark.style.width = `${100 * CUT}%`;
  return mark;
}

function row(entry, scale, colourOf, view, select) {
  const call = entry.call === undefined ? null : view.calls[entry.call];
  const bar = el("i", { class: `${entry.kind} ${call && entry.kind === "call" ? colourOf(call.agent) : ""}` });
  const place = el("span", { class: "place" }, gap(scale));
  if (entry.start !== null) {
    const left = scale.at(entry.start);
    bar.style.left = `${100 * left}%`;
    bar.style.width = `${100 * (scale.at(entry.start + entry.seconds) - left)}%`;
    place.append(bar);
  }
  const label = el("span", { class: "what" }, el("span", { class: "kind" }, KINDS[entry.kind]), " ", appendText(el("b"), entry.kind === "call" ? `${entry.label} · ${entry.call}` : entry.label), entry.error ? appendText(el("span", { class: "bad" }), ` ${entry.error.slice(0, 200)}`) : null, entry.detail ? appendText(el("span", { class: "detail" }), ` ${entry.detail}`) : null);
  label.style.paddingLeft = `${14 * Math.min(entry.depth, 8)}px`;
  const times = el("span", { class: "when" }, entry.start === null ? "time not told" : `${entry.start.toFixed(2)} s`, el("b", {}, entry.seconds || entry.kind === "call" ? precise(entry.seconds) : ""));
  if (entry.kind === "call" || entry.kind === "tools") return el("button", { class: "moment", type: "button", title: "Show it in the conversation", on: { click: () => select(entry.call) } }, label, place, times);
  return el("details", { class: "moment-more" }, el("summary", { class: "moment" }, label, place, times), facts(entry));
}

/** Fill `holder`; `select` shows a call in the conversation. */
export function drawTimeline(holder, view, colourOf, select) {
  const { entries, left_out: leftOut } = view.timeline;
  if (!entries.length) { holder.replaceChildren(el("p", { class: "empty" }, "Nothing with a time was recorded.")); return; }
  const timed = entries.filter((entry) => entry.start !== null);
  const start = Math.min(0, ...timed.map((entry) => entry.start)), end = Math.max(...timed.map((entry) => entry.start + entry.seconds), start + 0.001);
  const scale = scaleOf(timed, start, end);
  const counts = Object.entries(KINDS).map(([kind, noun]) => [entries.filter((entry) => entry.kind === kind).length, kind, noun]).filter(([count]) => count);
  const noun = { call: "model call", tools: "tool use", environment: "environment event", span: "span" };
  const legend = el("p", { class: "timeline-legend" }, counts.map(([count, kind]) => el("span", {}, el("i", { class: `dot of-${kind}` }), counted(count, noun[kind]))), el("span", { class: "spring" }), scale.waited ? el("span", {}, el("i", { class: "dot of-wait" }), `${precise(scale.waited)} in which nothing was recorded`) : null, leftOut ? el("span", { class: "warn" }, `${leftOut} more were not kept`) : null);
  const axis = el("div", { class: "moment axis", "aria-hidden": "true" }, el("span", { class: "what" }), el("span", { class: "place" }, [0, 0.25, 0.5, 0.75, 1].map((share) => { const time = scale.time(share), mark = el("span", {}, time === null ? "" : `${time.toFixed(scale.shown < 10 ? 1 : 0)} s`); mark.style.left = `${100 * share}%`; return mark; })), el("span", { class: "when" }));
  holder.replaceChildren(el("div", { class: "card timeline" }, legend, axis, entries.map((entry) => row(entry, scale, colourOf, view, select))));
}
