// Who came from whom: an outline of all candidates, with the lines of descent beside it.
import { appendText, counted, el, number, short } from "./common.js";
import { wordDifferences } from "./diff.js";

const ROW = 46, STEP = 16, LEFT = 18, DEEPEST = 9;
const LONGEST = 6000;
/** Texts of more characters than this are compared only for the candidate that is looked at. */

/** What is new in a candidate's texts, in a few words. */
export function changeOf(search, one) {
  const parent = search.parentOf(one);
  if (!parent) return one.made_by === "start" ? "the templates as they were given" : one.parents.length ? `from ${one.parents.join(", ")}, which the history lacks` : "";
  const changes = Object.entries(one.templates).flatMap(([name, { text }]) => {
    const before = parent.templates[name]?.text ?? "";
    if (text === before) return [];
    if (text.length + before.length > LONGEST) return [`${name}: ${number(text.length - before.length)} characters more`];
    const [gone, fresh] = wordDifferences(before, text).map((pieces) => pieces.filter(([, same]) => !same).map(([piece]) => piece.trim()).filter(Boolean).join(" … "));
    return [fresh ? `+ ${fresh}` : gone ? `− ${gone}` : "only spaces"];
  });
  return changes.join(" · ").replace(/\s+/g, " ").slice(0, 300) || `the same as ${parent.id}`;
}

function scoreNode(search, one) {
  const score = search.scoreOf(one.id);
  if (!score) return el("span", { class: "member-score muted" }, "not tried yet");
  const bar = el("i", { class: "meter" }), whole = score.purpose === "validation";
  bar.style.setProperty("--share", Math.max(0, Math.min(1, score.value / (search.highest || 1))));
  return el("span", { class: `member-score ${whole ? "" : "muted"}`, title: `mean reward on ${counted(score.tasks, `${score.purpose} task`)}` }, bar, el("b", {}, short(score.value)), el("span", { class: "of" }, whole ? "" : `on ${score.tasks}`));
}

export function drawFamily(holder, search, chosen, select) {
  const rows = search.outline(), place = new Map(rows.map(({ one }, index) => [one.id, index]));
  const deepest = Math.min(DEEPEST, Math.max(0, ...rows.map(({ depth }) => depth)));
  search.highest = Math.max(0, ...rows.map(({ one }) => search.scoreOf(one.id)?.value ?? 0));
  const width = LEFT + STEP * deepest + 10;
  const x = (index) => LEFT + STEP * Math.min(rows[index].depth, DEEPEST), y = (index) => ROW * index + ROW / 2;
  const svg = el("svg", { width, height: ROW * rows.length, "aria-hidden": "true" });
  rows.forEach(({ one }, index) => {
    const parent = search.parentOf(one);
    for (const id of one.parents) {
      if (!place.has(id) || place.get(id) >= index && id === parent?.id) continue;
      const from = place.get(id), main = id === parent?.id, [x0, y0, x1, y1] = [x(from), y(from), x(index), y(index)];
      const line = main ? `M${x0},${y0}V${y1 - 8}Q${x0},${y1} ${x0 + 8},${y1}H${x1}` : `M${x0},${y0}C${width},${y0} ${width},${y1} ${x1},${y1}`;
      svg.append(el("path", { d: line, class: main ? "" : "fork" }));
    }
  });
  rows.forEach(({ one }, index) => svg.append(el("circle", { cx: x(index), cy: y(index), r: one.id === search.bestId ? 6 : 4.5, class: one.id === search.bestId ? "best" : search.scoreOf(one.id)?.purpose === "validation" ? "validated" : "" })));
  const buttons = rows.map(({ one }, index) => {
    const merged = one.parents.length > 1 ? `merge of ${one.parents.join(" and ")}` : one.made_by;
    const about = el("span", { class: "who" }, el("b", {}, one.id), el("span", { class: "muted" }, ` ${merged}${one.round ? ` · round ${one.round}` : ""}`), one.id === search.bestId ? el("span", { class: "pill good" }, "best") : null, one.unfinished ? el("span", { class: "pill warn", title: "its round isn't complete" }, "unfinished") : null);
    const row = el("button", { class: "call member", type: "button", "data-candidate": one.id, "aria-current": String(one.id === chosen), on: { click: () => select(one.id) } }, about, scoreNode(search, one), appendText(el("span", { class: "what", dir: "auto" }), changeOf(search, one)));
    Object.assign(row.style, { top: `${ROW * index}px`, height: `${ROW}px`, paddingLeft: `${width}px` });
    return row;
  });
  holder.replaceChildren(el("div", { class: "graph family-rows" }, buttons, svg));
  holder.firstChild.style.height = `${ROW * rows.length}px`;
  if (holder.dataset.shown !== chosen) {
    const top = ROW * place.get(chosen);
    if (top < holder.scrollTop || top + ROW > holder.scrollTop + holder.clientHeight) holder.scrollTop = top - holder.clientHeight / 2;
    holder.dataset.shown = chosen;
  }
}
