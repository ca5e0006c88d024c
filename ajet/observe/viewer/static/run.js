// Charts of one run, or of several overlaid; updated while a run is in progress.
import { $, apiOf, debounce, el, fetchJson, fillRows, number, pageOf, poll, runsIn, runsText, setUrl, short, showLive } from "./common.js";
import { Charts } from "./charts.js";
import { RewardHistogram } from "./histogram.js";
import { RESULTS, SECTIONS, foldedAtFirst, metricsOf, otherSections } from "./panels.js";

const url = new URLSearchParams(location.search);
const stepIn = (key) => (url.has(key) ? Number(url.get(key)) : null);
const charts = new Charts(runsIn($("charts-page").dataset.runs), { smooth: Number(url.get("smooth") || 0), from: stepIn("from"), to: stepIn("to") });
const { runs, single, view } = charts;
let find = url.get("find") || "";
const histograms = runs.map((run) => new RewardHistogram({ name: run.name, zoomTo: (from, to) => charts.zoomTo(from, to), pick: (steps) => charts.pick(steps, run), range: () => charts.range(), colour: single ? "" : `--c${run.index % 8}` }));
charts.others.push(...histograms);

function build() {
  const names = charts.allNames().filter((name) => name !== "time");
  const wanted = find.toLowerCase();
  const sections = [...SECTIONS, ...otherSections(names)].map((section) => ({ title: section.title, panels: section.panels.flatMap((panel) => apart(panel, names)).filter((panel) => {
    const metrics = metricsOf(panel, names);
    return metrics.length && !(panel.alone && (!single || metrics.length < 2)) && (!wanted || `${panel.title} ${metrics.join(" ")}`.toLowerCase().includes(wanted));
  }) })).filter((section) => section.panels.length);
  const layout = JSON.stringify(sections.map((section) => section.panels.map((panel) => panel.title + (panel.metrics || ""))));
  if (layout !== build.layout) {
    build.layout = layout;
    $("sections").replaceChildren(...sections.map((section) => foldable(section.title, wanted,
      fillRows(el("div", { class: "charts" }, section.panels.map((panel) => charts.of(`${section.title} ${panel.title}`, panel).node),
        section.title === "Outcome" && (!wanted || "rewards by step".includes(wanted)) ? histograms.map((histogram) => histogram.node) : null)))));
    charts.resized.disconnect();
    charts.resized.observe($("sections"));
  }
  for (const chart of charts.shown()) chart.draw();
  for (const histogram of histograms) histogram.draw();
  $("none").hidden = runs.some((run) => run.count);
  charts.zoomed();
}
charts.zoomed = () => { $("reset-zoom").hidden = view.from === null && view.to === null; };

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
  if (charts.single || metrics.length < 2) return [panel];
  return metrics.map((name) => ({ ...panel, match: undefined, metrics: [name], title: panel.title === "pass@k" ? name.slice(name.lastIndexOf("/") + 1) : `${panel.title}: ${name.slice(name.indexOf("/") + 1).replaceAll("_", " ")}` }));
}

/** The results of several runs, side by side. */
async function results() {
  const query = new URLSearchParams(RESULTS.map((column) => ["name", column.metric]));
  const found = await Promise.all(runs.map((run) => fetchJson(`${apiOf(run.name)}/metrics?${query}`)));
  const columns = RESULTS.filter((column) => found.some(({ ends }) => ends[column.metric]));
  const cell = ({ ends }, column) => {
    if (!ends[column.metric]) return el("td", { class: "num muted" }, "–");
    const [first, highest, last] = ends[column.metric];
    if (column.best) return el("td", { class: "num strong" }, short(highest));
    return el("td", { class: "num" }, column.first ? el("span", { class: "muted" }, `${short(first)} → `) : null, el(column.first ? "b" : "span", {}, short(last)));
  };
  $("results").replaceChildren(
    el("thead", {}, el("tr", {}, el("th", {}, "Run"), el("th", { class: "num" }, "Steps"), columns.map((column) => el("th", { class: "num" }, column.label)))),
    el("tbody", {}, runs.map((run, index) => el("tr", {}, el("td", {}, el("a", { class: `name a${run.index % 8}`, href: pageOf(run.name) }, el("i", { class: "dot" }), run.name)), el("td", { class: "num" }, number(found[index].last)), columns.map((column) => cell(found[index], column))))));
}

/** Fetch how rewards are spread. Damaged episodes must not cost the other charts. */
async function spread() {
  const problem = (text) => { $("problem").textContent = text; $("problem").hidden = false; };
  try {
    const found = await fetchJson(`/api/rewards?runs=${encodeURIComponent(runsText(runs.map((run) => run.name)))}`);
    runs.forEach((run, index) => histograms[index].set(found.runs[run.name]));
    if (found.problems.length) problem(found.problems.join("; "));
  } catch (error) { problem(error.message); }
}

$("smooth").value = view.smooth;
$("smooth").addEventListener("input", debounce(() => { view.smooth = Number($("smooth").value); setUrl({ smooth: view.smooth || null }); charts.fill(); }, 80));
$("find-metric").value = find;
$("find-metric").addEventListener("input", () => { find = $("find-metric").value.trim(); setUrl({ find }); build(); });
$("reset-zoom").addEventListener("click", () => charts.zoomTo(null, null));
addEventListener("themechange", build);
if (!single) $("run-legend").replaceChildren(...runs.map((run) => el("a", { href: pageOf(run.name), class: `a${run.index % 8}` }, el("i", { class: "dot" }), run.name)));

poll(2, async () => {
  const changed = await charts.refresh();
  showLive(runs.some((run) => run.running));
  if (!changed && build.layout) return;
  if (!single) await results(); // above the charts, so that they don't move under the pointer
  build();
  await spread();
});
