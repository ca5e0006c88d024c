// Charts as SVG files: drawn anew from the numbers, since the page's own are pixels.
import { el } from "./common.js";

const WIDTH = 720, HEIGHT = 400, LEFT = 64, RIGHT = 20, TOP = 44, BOTTOM = 74;
const FONT = "system-ui, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
const across = WIDTH - LEFT - RIGHT, up = HEIGHT - TOP - BOTTOM;

/** Round values between two others, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

/** A sheet with title, axes and two scales: `{sheet, x, y}`. `rows`: labels of a vertical axis of rows instead of numbers. */
function sheet(title, hint, [firstStep, lastStep], [low, high], format, colours, rows = null) {
  const node = el("svg", { xmlns: "http://www.w3.org/2000/svg", width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "font-family": FONT });
  const text = (x, y, words, more = {}) => node.append(el("text", { x, y, fill: colours.muted, "font-size": 12, ...more }, words));
  const x = (step) => LEFT + across * (lastStep > firstStep ? (step - firstStep) / (lastStep - firstStep) : 0.5);
  const y = (value) => TOP + up * (1 - (high > low ? (value - low) / (high - low) : 0.5));
  node.append(el("rect", { width: WIDTH, height: HEIGHT, fill: colours.surface }));
  text(LEFT, 24, title, { fill: colours.text, "font-size": 15, "font-weight": 600 });
  text(WIDTH - RIGHT, 24, hint, { "text-anchor": "end" });
  for (const value of rows ? rows.map((_, index) => index) : ticks(low, high, 5)) {
    if (!rows) node.append(el("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), stroke: colours.line }));
    text(LEFT - 8, y(value) + 4, rows ? rows[value] : format(value), { "text-anchor": "end" });
  }
  for (const step of ticks(firstStep, lastStep, 8).filter(Number.isInteger)) text(x(step), HEIGHT - BOTTOM + 18, String(step), { "text-anchor": "middle" });
  text(LEFT + across / 2, HEIGHT - BOTTOM + 36, "step", { "text-anchor": "middle" });
  return { node, x, y };
}

/** `lines`: `[{label, colour, fill, values}]`, one value (or null) for each step; stacked ones are sums already, and filled. */
export function lineChart({ title, hint, steps, lines, range, stacked, format, colours, between: [from, to] }) {
  const { node, x, y } = sheet(title, hint, [from, to], range, format, colours);
  for (const { colour, fill, values } of stacked ? [...lines].reverse() : lines) {
    const points = values.map((value, index) => [steps[index], value]).filter(([step, value]) => value !== null && step >= from && step <= to).map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    if (!points.length) continue;
    if (stacked) node.append(el("path", { d: `M${points.join("L")}L${points.at(-1).split(",")[0]},${y(range[0])}L${points[0].split(",")[0]},${y(range[0])}Z`, fill }));
    if (points.length > 1) node.append(el("path", { d: `M${points.join("L")}`, fill: "none", stroke: colour, "stroke-width": 2 }));
    else node.append(el("circle", { cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 3.5, fill: colour }));
  }
  let left = LEFT;
  for (const { label, colour } of lines) {
    node.append(el("circle", { cx: left + 5, cy: HEIGHT - 16, r: 5, fill: colour }), el("text", { x: left + 16, y: HEIGHT - 12, fill: colours.text, "font-size": 12 }, label));
    left += 34 + 7 * label.length;
  }
  return new XMLSerializer().serializeToString(node);
}

/** `cells(x, y)`: yields `[left, width, top, height, strength]`. */
export function cellChart({ title, hint, rows, cells, colours, between }) {
  const [from, to] = between[0] < between[1] ? between : [between[0] - 0.5, between[0] + 0.5];
  const { node, x, y } = sheet(title, hint, [from - 0.5, to + 0.5], [-0.5, rows.length - 0.5], String, colours, rows);
  for (const [left, width, top, height, strength] of cells(x, y)) if (left + width > LEFT && left < WIDTH - RIGHT) node.append(el("rect", { x: left.toFixed(1), width: width.toFixed(1), y: top.toFixed(1), height: height.toFixed(1), fill: colours.accent, "fill-opacity": strength.toFixed(3) }));
  return new XMLSerializer().serializeToString(node);
}
