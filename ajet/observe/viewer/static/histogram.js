// How the rewards of each step are spread: a row for each reward (or range of rewards), a column for each step, and the
// bars of the step that the reader points at.
import { counted, el, number, short, style } from "./common.js";
import { pageColours, plotOptions, resizePlot, saveButtons } from "./plot.js";
import { cellChart } from "./svg.js";

const labelOf = ([low, high]) => (low === high ? short(low) : `${short(low)} … ${short(high)}`);

export class RewardHistogram {
  /**
   * `page`: what the charts of a page share: `zoomTo`, `pick`, `range` (first and last step shown). Where runs are compared,
   * each has a histogram in the `colour` of its lines.
   */
  constructor(page) {
    this.page = page;
    this.title = page.colour ? `Rewards of ${page.name}` : "Rewards by step";
    this.data = { bins: [], steps: [], counts: [], width: 1 };
    this.now = el("span", { class: "now" });
    this.keys = el("div", { class: "keys bars" });
    this.plot = el("div", { class: "plot", role: "img", "aria-label": "How the rewards of each step are spread" });
    this.node = el("article", { class: "card chart" }, el("header", {}, el("h3", {}, this.title), el("span", { class: "hint" }, page.colour ? "" : "stronger: more"), this.now,
      saveButtons(this.title, { ready: () => Boolean(this.uplot), canvas: () => this.uplot.ctx.canvas, svg: () => this.svg(), name: () => `${page.name} ${this.title}` })), this.plot, this.keys);
    if (page.colour) this.node.style.setProperty("--accent", `var(${page.colour})`);
  }

  /** The steps that a column stands for. */
  stepsAt(index) {
    const step = this.data.steps[index];
    return step === undefined ? null : [step, step + this.data.width - 1];
  }

  colour() { return getComputedStyle(this.node).getPropertyValue("--accent").trim(); }

  set(data) { this.data = data; this.node.hidden = !data.steps.length; this.draw(); }

  draw() {
    if (!this.data.steps.length || !this.node.isConnected) return;
    const { steps, bins } = this.data;
    const shape = JSON.stringify([bins, style("--is-dark")]);
    const columns = [steps, ...bins.map((_, bin) => this.data.counts.map((counts) => counts[bin]))];
    if (this.uplot && shape === this.shape) this.uplot.setData(columns, false);
    else { this.uplot?.destroy(); this.uplot = new uPlot(this.options(), columns, this.plot); this.shape = shape; }
    this.zoom();
    this.legend(null);
  }

  options() {
    const { bins } = this.data;
    const every = Math.ceil(bins.length / 8);
    const shown = bins.map((_, index) => index).filter((index) => index % every === 0);
    return plotOptions(this.plot, {
      grid: { show: false }, points: { show: false }, range: () => [-0.5, bins.length - 0.5],
      left: { splits: () => shown, values: () => shown.map((index) => short(bins[index][0])) },
      series: bins.map(() => ({ stroke: "transparent", points: { show: false }, paths: () => null })),
      legend: (index) => this.legend(index), zoomTo: this.page.zoomTo, pick: (index) => this.page.pick(this.stepsAt(index)),
      hooks: { drawClear: [(plot) => this.cells(plot)] },
    });
  }

  /** One rectangle for each step and bin; its strength is the share of the step's episodes. */
  cells(plot) {
    const pen = plot.ctx;
    pen.save();
    pen.beginPath();
    pen.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    pen.clip();
    pen.fillStyle = this.colour();
    for (const [x, width, y, height, share] of this.rectangles((step) => plot.valToPos(step, "x", true), (bin) => plot.valToPos(bin, "y", true))) {
      pen.globalAlpha = strength(share);
      pen.fillRect(x, y, width, height);
    }
    pen.restore();
  }

  /** `[[x, width, y, height, share] …]` of the cells that hold episodes. */
  * rectangles(across, up) {
    const { steps, counts, width } = this.data;
    const gap = steps.slice(1).reduce((least, step, index) => Math.min(least, step - steps[index]), Infinity);
    const half = width > 1 || !Number.isFinite(gap) ? 0.5 : gap / 2, size = width > 1 ? width - 0.5 : half;
    for (const [index, step] of steps.entries()) {
      const total = counts[index].reduce((sum, count) => sum + count, 0);
      const left = across(step - half), right = across(step + size);
      for (const [bin, count] of counts[index].entries()) {
        if (!count) continue;
        const top = up(bin + 0.5), bottom = up(bin - 0.5);
        yield [left, Math.max(1, right - left - 0.5), top + 1, Math.max(1, bottom - top - 2), count / total];
      }
    }
  }

  svg() {
    const self = this;
    return cellChart({
      title: this.title, hint: "share of the recorded episodes", rows: this.data.bins.map(labelOf), colours: { ...pageColours(), accent: this.colour() }, between: this.page.range(),
      cells: function* (x, y) { for (const [left, width, top, height, share] of self.rectangles(x, y)) yield [left, width, top, height, strength(share)]; },
    });
  }

  zoom() {
    const [low, high] = this.page.range();
    this.uplot?.setScale("x", low < high ? { min: low - 0.5, max: high + 0.5 } : { min: low - 0.5, max: low + 0.5 });
  }

  resize() { resizePlot(this.uplot, this.plot); }

  legend(index) {
    const at = index ?? this.data.steps.length - 1, counts = this.data.counts[at];
    if (!counts) return;
    const [first, last] = this.stepsAt(at);
    const most = Math.max(...counts), total = counts.reduce((sum, count) => sum + count, 0);
    this.now.replaceChildren(el("span", { class: "step" }, first === last ? `step ${first}` : `steps ${first}–${last}`), counted(total, "episode"));
    this.keys.replaceChildren(...counts.map((count, bin) => {
      const bar = el("i");
      bar.style.height = `${Math.round(20 * count / (most || 1))}px`;
      return el("span", { title: `reward ${labelOf(this.data.bins[bin])}: ${number(count)}` }, bar, counts.length <= 6 ? el("b", {}, `${labelOf(this.data.bins[bin])}: ${number(count)}`) : null);
    }));
  }
}

export const strength = (share) => 0.12 + 0.88 * share;
