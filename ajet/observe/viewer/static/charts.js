// Charts over steps that share their data, zoom and pointer. The server sends at most about 1,000 points of a metric,
// and only of the metrics that are on the screen; zooming in asks for the steps in between.
import { $, apiOf, debounce, el, fetchJson, pageOf, setUrl, short, style } from "./common.js";
import { pageColours, plotOptions, resizePlot, saveButtons } from "./plot.js";
import { lineChart } from "./svg.js";
import { metricsOf } from "./panels.js";

const AT_ONCE = 40;
uPlot.sync("steps");

export class Charts {
  /** `names`: the runs. `view`: `{smooth, from, to}`. */
  constructor(names, view = { smooth: 0, from: null, to: null }) {
    this.runs = names.map((name, index) => ({ name, index, names: [], steps: [], series: {}, ends: {}, first: 0, last: 0, count: 0, width: 1, stamp: "", asked: "", running: false }));
    this.single = this.runs.length === 1;
    this.view = view;
    this.all = new Map();
    this.others = [];
    this.watch = new IntersectionObserver((entries) => {
      for (const entry of entries) this.watched.get(entry.target).visible = entry.isIntersecting;
      this.fill();
    }, { rootMargin: "300px" });
    this.watched = new Map();
    this.resized = new ResizeObserver(debounce(() => { for (const chart of [...this.all.values(), ...this.others]) chart.resize(); }, 80));
  }

  /** The chart of a panel. The same panel gets the same chart. */
  of(key, panel) {
    if (!this.all.has(key)) this.all.set(key, new Chart(this, panel));
    return this.all.get(key);
  }

  allNames() { return [...new Set(this.runs.flatMap((run) => run.names))].sort(); }
  shown() { return [...this.all.values()].filter((chart) => chart.visible && chart.node.isConnected); }

  /** Fetch what has changed, or what the visible charts lack, one call after the other. Returns whether any run has new steps. */
  refresh() {
    this.turn = (this.turn ?? Promise.resolve()).catch(() => {}).then(async () => {
      const found = await Promise.all(this.runs.map((run) => this.load(run)));
      if (found.some(Boolean)) for (const chart of this.shown()) chart.draw();
      return found.includes("steps");
    });
    return this.turn;
  }

  /** The charts that have come into view get their data. */
  async fill() {
    try { await this.refresh(); } catch (error) { console.error(error); }
    // their data may have been there before they were
    for (const chart of this.shown()) if (!chart.uplot) chart.draw();
  }

  /** "steps": the run has new ones; "series": others of the same steps; "": nothing new. */
  async load(run) {
    const names = new Map();
    for (const chart of this.shown()) for (const name of metricsOf(chart.panel, run.names.length ? run.names : chart.panel.metrics ?? [])) names.set(name, chart.panel.stacked ? "stacked" : "name");
    const view = { smooth: this.view.smooth || "", from: this.view.from ?? "", to: this.view.to ?? "" };
    const asked = JSON.stringify(view), same = asked === run.asked;
    const lacking = same ? [...names].filter(([name]) => !(name in run.series)) : [];
    const found = await this.fetch(run, lacking.length ? lacking : [...names], view, same && !lacking.length ? run.stamp : "");
    run.running = found.running;
    if (found.unchanged) return "";
    if (found.problem) { $("problem").textContent = found.problem; $("problem").hidden = false; }
    const fresh = found.stamp !== run.stamp;
    if (lacking.length && !fresh) { Object.assign(run.series, found.series); Object.assign(run.ends, found.ends); return "series"; }
    Object.assign(run, lacking.length ? await this.fetch(run, [...names], view, "") : found, { asked });
    return fresh ? "steps" : "series";
  }

  async fetch(run, names, view, known) {
    const parts = [];
    for (let start = 0; start === 0 || start < names.length; start += AT_ONCE) {
      const query = new URLSearchParams([...Object.entries({ ...view, known }).filter(([, value]) => value !== ""), ...names.slice(start, start + AT_ONCE).map(([name, kind]) => [kind, name])]);
      parts.push(await fetchJson(`${apiOf(run.name)}/metrics?${query}`));
    }
    const last = parts.at(-1);
    if (parts.some((part) => part.stamp !== last.stamp)) return this.fetch(run, names, view, known);
    return { ...last, series: Object.assign({}, ...parts.map((part) => part.series)), ends: Object.assign({}, ...parts.map((part) => part.ends)) };
  }

  /** The first and the last step on the charts: what was zoomed to, or all. */
  range() {
    const last = Math.max(...this.runs.map((run) => run.last)), first = Math.min(...this.runs.map((run) => (run.count ? run.first : last)));
    return [this.view.from ?? first, this.view.to ?? last];
  }

  zoomTo(from, to) {
    if (from !== null && to <= from) return;
    Object.assign(this.view, { from, to });
    setUrl({ from, to });
    for (const other of this.others) other.zoom();
    this.zoomed?.();
    this.fill();
  }

  /** A click on a chart leads to the episodes of the steps under it. */
  pick(steps, run = this.runs[0]) {
    if (steps) location.href = `${pageOf(run.name, "episodes")}?step_min=${steps[0]}&step_max=${steps[1]}`;
  }
}

// ---------------------------------------------------------------- data of a chart

function linesOf({ runs, single }, panel, names) {
  const lines = [];
  for (const run of runs) for (const [rank, name] of names.entries()) {
    if (!run.series[name]) continue;
    const label = panel.labels ? panel.labels[panel.metrics.indexOf(name)] : single ? name.slice(name.indexOf("/") + 1).replaceAll("_", " ") : run.name;
    lines.push({ run, name, label, colour: single ? rank : run.index });
  }
  return lines;
}

function dataOf(single, panel, lines) {
  const steps = [...new Set(lines.flatMap((line) => line.run.steps))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map((line) => {
    const column = new Array(steps.length).fill(null);
    line.run.series[line.name].forEach((value, index) => { column[at.get(line.run.steps[index])] = value; });
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
  constructor(charts, panel) {
    this.charts = charts;
    this.panel = panel;
    this.format = panel.format || short;
    this.now = el("span", { class: "now" });
    this.keys = el("div", { class: "keys" });
    this.plot = el("div", { class: "plot", role: "img", "aria-label": `${panel.title} by step` });
    this.node = el("article", { class: "card chart" }, el("header", {}, el("h3", { title: panel.title }, panel.title), el("span", { class: "hint" }, panel.hint || ""), this.now,
      saveButtons(panel.title, { ready: () => this.ready(), canvas: () => this.uplot.ctx.canvas, svg: () => this.svg(), name: () => `${charts.runs.map((run) => run.name).join("_")} ${panel.title}` })), this.plot, this.keys);
    this.visible = false;
    charts.watched.set(this.node, this);
    charts.watch.observe(this.node);
  }

  /** Draw the chart even if it has only just come into view. */
  async ready() {
    if (!this.uplot) {
      this.visible = true;
      await this.charts.fill();
      await new Promise(requestAnimationFrame);
    }
    return Boolean(this.uplot);
  }

  /** What is drawn, as the text of an SVG file. */
  svg() {
    const { min, max } = this.uplot.scales.y;
    return lineChart({
      title: this.panel.title, hint: this.panel.hint || "", steps: this.steps, range: [min, max], between: this.charts.range(), stacked: this.panel.stacked && this.charts.single,
      format: this.panel.format || compact, colours: pageColours(),
      lines: this.lines.map((line, index) => ({ label: line.label, colour: style(`--c${line.colour % 8}`), fill: mixed(style(`--c${line.colour % 8}`)), values: this.drawn[index] })),
    });
  }

  draw() {
    if (!this.visible) return;
    const { single } = this.charts;
    const lines = linesOf(this.charts, this.panel, metricsOf(this.panel, this.charts.allNames()));
    if (!lines.length) return;
    const [steps, columns, drawn] = dataOf(single, this.panel, lines);
    this.lines = lines; this.steps = steps; this.columns = columns; this.drawn = drawn;
    const stacked = this.panel.stacked && single;
    // stacked areas are drawn from the top down, so that each covers those above it
    const order = lines.map((_, index) => stacked ? lines.length - 1 - index : index);
    const data = [steps, ...order.map((index) => drawn[index])];
    const shape = JSON.stringify([lines.map((line) => [line.run.name, line.name, this.alone(line)]), style("--is-dark")]);
    if (this.uplot && shape === this.shape) this.uplot.setData(data, false);
    else { this.uplot?.destroy(); this.uplot = new uPlot(this.options(order.map((index) => lines[index]), stacked), data, this.plot); this.shape = shape; }
    this.zoom();
    this.legend(null);
  }

  /** Whether a line has a single point, which is no line yet. */
  alone(line) { return this.columns[this.lines.indexOf(line)].filter((value) => value !== null).length < 2; }

  options(lines, stacked) {
    const { charts } = this;
    return plotOptions(this.plot, {
      grid: { stroke: style("--line"), width: 1 }, points: { size: 6 }, range: (_, low, high) => rangeOf(low, high, stacked),
      left: { values: (_, ticks) => ticks.map(this.panel.format || compact) },
      series: lines.map((line) => ({ stroke: style(`--c${line.colour % 8}`), width: 1.6, spanGaps: true, points: { show: this.alone(line) }, fill: stacked ? mixed(style(`--c${line.colour % 8}`)) : undefined })),
      legend: (index) => this.legend(index), zoomTo: (from, to) => charts.zoomTo(from, to),
      pick: (index) => { if (charts.single) charts.pick(this.stepsAt(index)); },
    });
  }

  zoom() {
    const [low, high] = this.charts.range();
    this.uplot.setScale("x", low < high ? { min: low, max: high } : { min: low - 0.5, max: low + 0.5 });
  }

  /** The steps that a point stands for: one, or those of its bucket. */
  stepsAt(index) {
    const step = this.steps[index], { width, steps, last } = this.lines[0].run;
    if (step === undefined) return null;
    if (width === 1) return [step, step];
    const at = steps.findLastIndex((one) => one <= step), bucket = Math.max(0, at - at % 2);
    return [steps[bucket], bucket + 2 < steps.length ? steps[bucket + 2] - 1 : Math.min(last, this.charts.range()[1])];
  }

  /** The value of a line at a point; of a run with fewer points than others, at the one before. */
  valueAt(line, index) {
    if (index === null) return line.run.ends[line.name]?.[2] ?? null;
    const column = this.columns[this.lines.indexOf(line)];
    for (let at = index; at >= 0 && at > index - (line.run.width === 1 ? 1 : 4); at--) if (column[at] !== null) return column[at];
    return null;
  }

  legend(index) {
    const alone = this.lines.length === 1, { single } = this.charts;
    const value = (line) => this.format(this.valueAt(line, index));
    const [from, to] = index === null ? [] : this.stepsAt(index) ?? [];
    this.now.replaceChildren(from === undefined ? "" : el("span", { class: "step" }, from === to ? `step ${from}` : `steps ${from}–${to}`), alone ? value(this.lines[0]) : "");
    this.keys.replaceChildren(...(alone && single ? [] : this.lines.map((line) => el("span", { class: `a${line.colour % 8}` }, el("i", { class: "dot" }), line.label, el("b", {}, value(line))))));
    this.keys.hidden = alone && single;
  }

  resize() { resizePlot(this.uplot, this.plot); }
}

function rangeOf(low, high, stacked) {
  if (low === null || high === null) return [0, 1];
  if (stacked) return [0, high * 1.05 || 1];
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.1;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}
const compact = (value) => Math.abs(value) >= 1e9 ? value.toExponential(1).replace("+", "") : Math.abs(value) >= 1e6 ? `${Number((value / 1e6).toPrecision(3))}M` : Math.abs(value) >= 1000 ? `${Number((value / 1000).toPrecision(3))}k` : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
function mixed(colour) {
  const [r, g, b] = colour.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  const base = style("--is-dark") === "1" ? [20, 24, 30] : [255, 255, 255];
  return `rgb(${[r, g, b].map((part, i) => Math.round(part * 0.28 + base[i] * 0.72)).join(" ")})`;
}
