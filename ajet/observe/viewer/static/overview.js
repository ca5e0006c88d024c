// The overview of a run: whether it is learning, what is wrong, and the episodes that show it.
import { $, apiOf, appendText, counted, el, experiment, fetchJson, fillRows, modelName, number, pageOf, percent, pill, poll, rewardClass, seconds, short, showLive } from "./common.js";
import { Charts } from "./charts.js";
import { OVERVIEW, metricsOf } from "./panels.js";

const name = experiment();
const charts = new Charts([name]);
const grid = fillRows(el("div", { class: "charts" }));
const page = (link) => `${pageOf(name)}/${link}`;
grid.append(...OVERVIEW.map((panel) => Object.assign(charts.of(panel.title, panel), { visible: true }).node));
$("sections").append(grid);
charts.resized.observe($("sections"));

/** A chart whose metric nobody has logged isn't shown. */
function draw() {
  for (const panel of OVERVIEW) charts.of(panel.title, panel).node.hidden = !metricsOf(panel, charts.allNames()).length;
}

function finding({ level, text, link, change, episodes }) {
  const shown = episodes.map((id, index) => el("a", { href: pageOf(name, "episode", id) }, `Episode ${index + 1}`));
  const links = [link ? el("a", { href: page(link) }, "Show") : null, ...shown].filter(Boolean).flatMap((one, index) => [index ? " · " : " ", one]);
  return el("li", { class: level }, appendText(el("span"), text), links, change ? appendText(el("div", { class: "muted" }), `Change: ${change}`) : null);
}

function findings(list, holder, otherwise) {
  holder.replaceChildren(...list.map(finding));
  if (!list.length) holder.append(el("li", { class: "quiet" }, otherwise));
}

function taskRows(rows, value, otherwise) {
  if (!rows.length) return [el("p", { class: "muted" }, otherwise)];
  return [el("table", { class: "list quiet" }, el("tbody", {}, rows.map((one) => el("tr", {}, el("td", {}, el("a", { class: "name", href: pageOf(name, "task", one.task_id) }, one.task_id), appendText(el("span", { class: "preview", dir: "auto" }), one.preview)), el("td", { class: "num" }, value(one))))))];
}

function tasks(found) {
  $("tasks-of-note").hidden = !found.improved;
  if (!found.improved) return;
  $("improved").replaceChildren(...taskRows(found.improved, (one) => [el("span", { class: "good strong" }, `+${percent(one.change)}`), el("span", { class: "muted" }, ` to ${percent(one.latest)} solved`)], "No task is solved more often in its last step than in its first."));
  $("unsolved").replaceChildren(...taskRows(found.unsolved, (one) => el("span", { class: "muted" }, counted(one.attempts, "attempt")), "Each task was solved at least once."));
  $("unsolved-count").replaceChildren(...(found.unsolved_count > found.unsolved.length ? [el("a", { href: page("tasks?solved_max=0&sort=attempts&order=desc") }, `all ${number(found.unsolved_count)}`)] : []));
}

/** How one task was answered in the beginning, and how at the end. */
function pair(found) {
  $("pair").hidden = !found;
  if (!found) return;
  const [first, last] = found.episodes;
  const side = (title, one) => el("div", {}, el("div", { class: "row" }, el("a", { class: "name", href: pageOf(name, "episode", one.episode_id) }, `${title}: step ${number(one.step)}`), el("span", { class: `strong ${rewardClass(one.reward)}` }, `reward ${short(one.reward)}`)), appendText(el("div", { class: "text said", dir: "auto" }), one.said || "(no text)"));
  $("pair").replaceChildren(
    el("div", { class: "row wrapping" }, el("h2", {}, "First against last episode"), el("span", { class: "spring" }), el("a", { href: `${pageOf(name, "differences")}?a=${encodeURIComponent(first.episode_id)}&b=${encodeURIComponent(last.episode_id)}` }, "Differences")),
    appendText(el("p", { class: "text asked", dir: "auto" }), found.query.slice(0, 400)),
    el("div", { class: "two" }, side("First", first), side("Last", last)));
}

function totals({ totals: found, phases }) {
  const shown = [["Training episodes", "training_episodes", number], ["Validation episodes", "validation_episodes", number], ["Tokens sampled", "sampled_tokens", number], ["Tokens trained", "trained_tokens", number], ["Time so far", "seconds", seconds], ["Expected in all", "expected_seconds", seconds], ["GPU hours", "gpu_hours", short], ["Seconds per step", "seconds_per_step", short], ["Helper's tokens", "helper_tokens", number], ["Helper's price", "helper_cost", short], ["Cost", "cost", number]];
  $("tiles").replaceChildren(...shown.filter(([, key]) => key in found).map(([label, key, format]) => el("dl", { class: "tile" }, el("dt", {}, label), el("dd", {}, format(found[key])))));
  const all = Object.values(phases).reduce((sum, value) => sum + value, 0);
  $("phases").hidden = !all;
  const part = (value, index) => { const bar = el("i", { class: `a${index}` }); bar.style.width = `${100 * value / all}%`; return bar; };
  $("phases").replaceChildren(el("h2", {}, "Where the time went"), el("div", { class: "bar" }, Object.values(phases).map(part)),
    el("div", { class: "keys" }, Object.entries(phases).map(([phase, value], index) => el("span", { class: `a${index}` }, el("i", { class: "dot" }), phase, el("b", {}, seconds(value))))));
}

async function show() {
  const found = await fetchJson(`${apiOf(name)}/overview`);
  $("verdict").textContent = found.verdict.title;
  $("verdict").className = `verdict ${found.verdict.level}`;
  findings(found.verdict.because, $("because"), "Charts appear with the first step.");
  findings(found.health, $("health"), "Nothing is wrong as far as is recorded.");
  tasks(found);
  pair(found.pair);
  totals(found);
  $("overview").dataset.ready = "1";
}

addEventListener("themechange", () => { for (const chart of charts.shown()) chart.draw(); });
let status = "";
poll(2, async () => {
  const changed = await charts.refresh();
  showLive(charts.runs[0].running);
  draw();
  if (!changed && $("overview").dataset.ready && status !== "running") return;
  const about = await fetchJson(apiOf(name));
  if (!changed && about.status === status && $("overview").dataset.ready) return;
  status = about.status;
  $("status").replaceChildren(pill(status));
  $("about-run").replaceChildren();
  appendText($("about-run"), [about.backbone, about.algorithm, modelName(about.model), `step ${number(about.step)}`].filter(Boolean).join(" · "));
  await show();
});
