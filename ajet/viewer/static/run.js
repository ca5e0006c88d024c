// Charts of one run, or of several overlaid; updated while a run is in progress.
import { $, apiOf, copyLink, debounce, el, fetchJson, number, pageOf, poll, setUrl, short, showLive } from "./common.js";
import { RewardHistogram } from "./histogram.js";
import { pageColours, saveButtons } from "./save.js";
import { lineChart } from "./svg.js";
import { SECTIONS, TILES, foldedAtFirst, metricsOf, otherSections } from "./panels.js";

const runs = $("charts-page").dataset.runs.split(",").filter(Boolean).map((name, index) => ({ name, index, steps: [], series: {}, running: false, generation: "" }));
const single = runs.length === 1;
const url = new URLSearchParams(location.search);
const view = { smooth: Number(url.get("smooth") || 0), from: url.has("from") ? Number(url.get("from")) : null, to: url.has("to") ? Number(url.get("to")) : null, find: url.get("find") || "" };
const charts = new Map();
const sync = uPlot.sync("steps");
const HEIGHT = 186;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function refresh(run) {
  const after = run.steps.length ? run.steps.at(-1) : null;
  const fresh = await fetchJson(`${apiOf(run.name)}/metrics${after === null ? "" : `?after=${after}`}`);
  run.running = fresh.running;
  if (fresh.problem) { $("problem").textContent = fresh.problem; $("problem").hidden = false; }
  if (run.generation && fresh.generation !== run.generation) { run.steps = []; run.series = {}; run.generation = ""; return refresh(run); }
  run.generation = fresh.generation;
  if (!fresh.steps.length) return false;
  const before = run.steps.length;
  run.steps.push(...fresh.steps);
  for (const name of Object.keys(fresh.series)) {
    run.series[name] ??= new Array(before).fill(null);
    run.series[name].push(...fresh.series[name]);
  }
  for (const values of Object.values(run.series)) while (values.length < run.steps.length) values.push(null);
  return true;
}

// ---------------------------------------------------------------- data of a chart

/** Exponential moving average, corrected for the bias of its start. */
function smoothed(values) {
  if (!view.smooth) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = view.smooth * sum + (1 - view.smooth) * value;
    weight = view.smooth * weight + (1 - view.smooth);
    return sum / weight;
  });
}

function linesOf(panel, names) {
  const lines = [];
  for (const run of runs) for (const [rank, name] of names.entries()) {
    if (!run.series[name]) continue;
    const label = panel.labels ? panel.labels[panel.metrics.indexOf(name)] : single ? name.slice(name.indexOf("/") + 1).replaceAll("_", " ") : run.name;
    lines.push({ run, name, label, colour: single ? rank : run.index });
  }
  return lines;
}

/** A line's values. Stacked metrics are counts: a step that logged none had zero. */
function counted(panel, { run, name }) {
  const trained = run.series["episode/count"] || [];
  return panel.stacked ? run.series[name].map((value, index) => value ?? (trained[index] === null || trained[index] === undefined ? null : 0)) : run.series[name];
}

function dataOf(panel, lines) {
  const steps = [...new Set(lines.flatMap((line) => line.run.steps))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map((line) => {
    const column = new Array(steps.length).fill(null);
    smoothed(counted(panel, line)).forEach((value, index) => { column[at.get(line.run.steps[index])] = value; });
    return column;
  });
  if (!panel.stacked || !single) return [steps, columns, columns];
  const sums = new Array(steps.length).fill(0);
  const logged = steps.map((_, index) => columns.some((column) => column[index] !== null));
  const stacked = columns.map((column) => column.map((value, index) => (logged[index] ? sums[index] += value || 0 : null)));
  return [steps, columns, stacked];
}

// ---------------------------------------------------------------- one chart

class Chart {
  constructor(panel) {
    this.panel = panel;
    this.format = panel.format || short;
    this.now = el("span", { class: "now" });
    this.keys = el("div", { class: "keys" });
    this.plot = el("div", { class: "plot", role: "img", "aria-label": `${panel.title} by step` });
    this.node = el("article", { class: "card chart" }, el("header", {}, el("h3", {}, panel.title), el("span", { class: "hint" }, panel.hint || ""), this.now,
      saveButtons(panel.title, { canvas: () => this.uplot.ctx.canvas, svg: () => this.svg(), name: () => `${runs.map((run) => run.name).join("_")} ${panel.title}` })), this.plot, this.keys);
    this.visible = false;
    watch.observe(this.node);
    watched.set(this.node, this);
  }

  /** What is drawn, as the text of an SVG file. */
  svg() {
    const { min, max } = this.uplot.scales.y;
    return lineChart({
      title: this.panel.title, hint: this.panel.hint || "", steps: this.steps, range: [min, max], between: shownSteps(), stacked: this.panel.stacked && single,
      format: this.panel.format || compact, colours: pageColours(),
      lines: this.lines.map((line, index) => ({ label: line.label, colour: style(`--c${line.colour % 8}`), fill: mixed(style(`--c${line.colour % 8}`)), values: this.drawn[index] })),
    });
  }

  draw() {
    if (!this.visible) return;
    const names = metricsOf(this.panel, allNames());
    const lines = linesOf(this.panel, names);
    const [steps, columns, drawn] = dataOf(this.panel, lines);
    this.lines = lines; this.steps = steps; this.columns = columns; this.drawn = drawn;
    const stacked = this.panel.stacked && single;
    // stacked areas are drawn from the top down, so that each covers those above it
    const order = lines.map((_, index) => stacked ? lines.length - 1 - index : index);
    const data = [steps, ...order.map((index) => drawn[index])];
    const shape = JSON.stringify([lines.map((line) => [line.run.name, line.name]), style("--is-dark")]);
    if (this.uplot && shape === this.shape) this.uplot.setData(data, false);
    else { this.uplot?.destroy(); this.uplot = new uPlot(this.options(order.map((index) => lines[index]), stacked), data, this.plot); this.shape = shape; }
    this.zoom();
    this.legend(null);
  }

  options(lines, stacked) {
    const axis = { stroke: style("--muted"), font: "11px system-ui", grid: { stroke: style("--line"), width: 1 }, ticks: { show: false } };
    const dots = this.steps.length < 2;
    return {
      width: Math.max(100, this.plot.clientWidth), height: HEIGHT, legend: { show: false }, padding: [8, 6, 0, 0],
      cursor: { sync: { key: "steps", setSeries: false }, y: false, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high, stacked) } },
      axes: [{ ...axis, size: 24, gap: 4, label: "step", labelSize: 16, labelGap: 0, labelFont: "11px system-ui", incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] }, { ...axis, size: 46, gap: 4, values: (_, ticks) => ticks.map((tick) => this.panel.format ? this.panel.format(tick) : compact(tick)) }],
      series: [{}, ...lines.map((line) => ({ stroke: style(`--c${line.colour % 8}`), width: 1.6, spanGaps: true, points: { show: dots }, fill: stacked ? mixed(style(`--c${line.colour % 8}`)) : undefined }))],
      hooks: {
        setCursor: [(plot) => this.legend(plot.cursor.idx ?? null)],
        setSelect: [(plot) => { if (plot.select.width > 4) zoomTo(Math.round(plot.posToVal(plot.select.left, "x")), Math.round(plot.posToVal(plot.select.left + plot.select.width, "x"))); plot.setSelect({ width: 0, height: 0 }, false); }],
        ready: [(plot) => {
          plot.over.addEventListener("dblclick", () => zoomTo(null, null));
          let down = 0;
          plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
          plot.over.addEventListener("click", (event) => { if (single && Math.abs(event.clientX - down) < 3 && event.detail === 1) pick(this.steps[plot.cursor.idx]); });
        }],
      },
    };
  }

  zoom() {
    const [low, high] = shownSteps();
    this.uplot.setScale("x", low < high ? { min: low, max: high } : { min: low - 0.5, max: low + 0.5 });
  }

  legend(index) {
    const at = index ?? this.steps.length - 1;
    const value = (line) => { const column = this.columns[this.lines.indexOf(line)]; return index === null ? column.findLast((entry) => entry !== null) ?? null : column[at]; };
    const alone = this.lines.length === 1;
    this.now.replaceChildren(index === null ? "" : el("span", { class: "step" }, `step ${this.steps[at]}`), alone ? this.format(value(this.lines[0])) : "");
    this.keys.replaceChildren(...(alone && single ? [] : this.lines.map((line) => el("span", { class: `a${line.colour % 8}` }, el("i", { class: "dot" }), line.label, el("b", {}, this.format(value(line)))))));
    this.keys.hidden = alone && single;
  }
}

/** The first and the last step on the charts: what was zoomed to, or all. */
function shownSteps() {
  const last = Math.max(...runs.map((run) => run.steps.at(-1) ?? 0)), first = Math.min(...runs.map((run) => run.steps[0] ?? last));
  return [view.from ?? first, view.to ?? last];
}

function rangeOf(low, high, stacked) {
  if (low === null || high === null) return [0, 1];
  if (stacked) return [0, high * 1.05 || 1];
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.1;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}
const compact = (value) => Math.abs(value) >= 1000 ? `${Number((value / 1000).toPrecision(3))}k` : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
function mixed(colour) {
  const [r, g, b] = colour.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  const base = style("--is-dark") === "1" ? [20, 24, 30] : [255, 255, 255];
  return `rgb(${[r, g, b].map((part, i) => Math.round(part * 0.28 + base[i] * 0.72)).join(" ")})`;
}

// ---------------------------------------------------------------- the page

const watched = new Map();
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = watched.get(entry.target);
    if (entry.isIntersecting && !chart.visible) { chart.visible = true; chart.draw(); }
  }
}, { rootMargin: "300px" });
const resized = new ResizeObserver(debounce(() => { for (const chart of charts.values()) chart.uplot?.setSize({ width: Math.max(100, chart.plot.clientWidth), height: HEIGHT }); for (const histogram of histograms) histogram.resize(); }, 80));
const histograms = runs.map((run) => new RewardHistogram({ name: run.name, zoomTo, pick: (step) => pick(step, run), range: shownSteps, colour: single ? "" : `--c${run.index % 8}` }));

const allNames = () => [...new Set(runs.flatMap((run) => Object.keys(run.series)))].sort();

function build() {
  const names = allNames().filter((name) => name !== "time");
  const wanted = view.find.toLowerCase();
  const sections = [...SECTIONS, ...otherSections(names)].map((section) => ({ title: section.title, panels: section.panels.flatMap((panel) => apart(panel, names)).filter((panel) => {
    const metrics = metricsOf(panel, names);
    return metrics.length && !(panel.alone && (!single || metrics.length < 2)) && (!wanted || `${panel.title} ${metrics.join(" ")}`.toLowerCase().includes(wanted));
  }) })).filter((section) => section.panels.length);
  const layout = JSON.stringify(sections.map((section) => section.panels.map((panel) => panel.title + (panel.metrics || ""))));
  if (layout !== build.layout) {
    build.layout = layout;
    $("sections").replaceChildren(...sections.map((section) => foldable(section.title, wanted,
      el("div", { class: "charts" }, section.panels.map((panel) => {
        const key = `${section.title} ${panel.title}`;
        if (!charts.has(key)) charts.set(key, new Chart(panel));
        return charts.get(key).node;
      }), section.title === "Outcome" && (!wanted || "rewards by step".includes(wanted)) ? histograms.map((histogram) => histogram.node) : null))));
    resized.disconnect();
    resized.observe($("sections"));
  }
  for (const chart of charts.values()) if (chart.node.isConnected) chart.draw();
  for (const histogram of histograms) histogram.draw();
  $("none").hidden = runs.some((run) => run.steps.length);
  $("reset-zoom").hidden = view.from === null && view.to === null;
  tiles();
}

/** A section that folds. What the reader chose is kept; while metrics are searched for, all are open. */
function foldable(title, searching, content) {
  const key = `ajet-folded ${title}`, kept = localStorage.getItem(key);
  const node = el("details", { class: "section", open: Boolean(searching) || !(kept === null ? foldedAtFirst(title) : kept === "1") }, el("summary", {}, el("h2", {}, title)), content);
  node.querySelector("summary").addEventListener("click", () => localStorage.setItem(key, node.open ? "1" : "0"));
  return node;
}

/** Overlaid runs get one metric per chart; a single run shows related metrics together. */
function apart(panel, names) {
  const metrics = metricsOf(panel, names);
  if (single || metrics.length < 2) return [panel];
  return metrics.map((name) => ({ ...panel, match: undefined, metrics: [name], title: panel.title === "pass@k" ? name.slice(name.lastIndexOf("/") + 1) : `${panel.title}: ${name.slice(name.indexOf("/") + 1).replaceAll("_", " ")}` }));
}

const RESULTS = [
  { label: "Return", metric: "return/mean", first: true }, { label: "Best return", metric: "return/mean", best: true },
  { label: "Best validation", metric: "val/return/mean", best: true }, ...TILES.filter((tile) => ["KL", "Entropy", "Tokens per second", "Seconds per step"].includes(tile.label)),
];

/** The results of several runs, side by side. */
function results() {
  const columns = RESULTS.filter((column) => runs.some((run) => run.series[column.metric]));
  const cell = (run, column) => {
    const values = (run.series[column.metric] || []).filter((value) => value !== null), format = column.format || short;
    if (!values.length) return el("td", { class: "num muted" }, "–");
    if (column.best) return el("td", { class: "num strong" }, format(values.reduce((best, value) => Math.max(best, value))));
    return el("td", { class: "num" }, column.first ? el("span", { class: "muted" }, `${format(values[0])} → `) : null, el(column.first ? "b" : "span", {}, format(values.at(-1))));
  };
  $("results").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", {}, "Run"), el("th", { class: "num" }, "Steps"), columns.map((column) => el("th", { class: "num" }, column.label)))),
    el("tbody", {}, runs.map((run) => el("tr", {}, el("td", {}, el("a", { class: `name a${run.index % 8}`, href: pageOf(run.name) }, el("i", { class: "dot" }), run.name)), el("td", { class: "num" }, number(run.steps.at(-1) ?? 0)), columns.map((column) => cell(run, column))))));
}

function tiles() {
  if (!single) return results();
  const [run] = runs;
  const shown = TILES.filter((tile) => run.series[tile.metric]);
  const entry = (label, value, small) => el("dl", { class: "tile" }, el("dt", {}, label), el("dd", {}, value, small ? el("small", {}, small) : null));
  $("tiles").replaceChildren(...(run.steps.length ? [entry("Step", number(run.steps.at(-1)))] : []), ...shown.map((tile) => {
    const values = run.series[tile.metric].filter((value) => value !== null);
    const format = tile.format || short;
    const change = values.length > 1 ? `from ${format(values[0])}` : "";
    return entry(tile.label, format(values.at(-1) ?? null), ["Reward", "Success"].includes(tile.label) ? change : "");
  }));
}

function zoomTo(from, to) {
  if (from !== null && to <= from) return;
  view.from = from; view.to = to;
  setUrl({ from, to });
  $("reset-zoom").hidden = from === null;
  for (const chart of charts.values()) if (chart.uplot) chart.zoom();
  for (const histogram of histograms) histogram.zoom();
}

/** A click on a chart leads to the episodes of that step. */
function pick(step, run = runs[0]) {
  if (step !== undefined) location.href = `${pageOf(run.name, "episodes")}?step_min=${step}&step_max=${step}`;
}

$("smooth").value = view.smooth;
$("smooth").addEventListener("input", () => { view.smooth = Number($("smooth").value); setUrl({ smooth: view.smooth || null }); build(); });
$("find-metric").value = view.find;
$("find-metric").addEventListener("input", () => { view.find = $("find-metric").value.trim(); setUrl({ find: view.find }); build(); });
$("reset-zoom").addEventListener("click", () => zoomTo(null, null));
$("copy-link").addEventListener("click", copyLink);
addEventListener("themechange", build);
if (!single) $("run-legend").replaceChildren(...runs.map((run) => el("a", { href: pageOf(run.name), class: `a${run.index % 8}` }, el("i", { class: "dot" }), run.name)));

poll(2, async () => {
  const changed = await Promise.all(runs.map(refresh));
  showLive(runs.some((run) => run.running));
  if (changed.some(Boolean) || !build.layout) {
    build();
    await spread();
  }
});

/** Fetch how rewards are spread. Damaged episodes must not cost the other charts. */
async function spread() {
  const problem = (text) => { $("problem").textContent = text; $("problem").hidden = false; };
  try {
    const found = await fetchJson(`/api/rewards?runs=${encodeURIComponent(runs.map((run) => run.name).join(","))}`);
    runs.forEach((run, index) => histograms[index].set(found.runs[run.name]));
    if (found.problems.length) problem(found.problems.join("; "));
  } catch (error) { problem(error.message); }
}
