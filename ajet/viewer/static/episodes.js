// The list of episodes. Filters, order and page are in the URL; the server does the work.
import { $, apiOf, copyLink, debounce, el, experiment, fetchJson, number, pageOf, pill, poll, rewardClass, seconds, setUrl, short, showLive, signClass, signed } from "./common.js";

const name = experiment();
const form = $("filters");
const LIMIT = 100;
const url = new URLSearchParams(location.search);
const state = { sort: url.get("sort") || "id", order: url.get("order") || "desc", offset: Number(url.get("offset") || 0), total: 0 };
let request = null;

function query() {
  const values = Object.fromEntries([...new FormData(form)].map(([key, value]) => [key, String(value).trim()]));
  return { ...values, sort: state.sort === "id" ? "" : state.sort, order: state.order === "desc" ? "" : state.order, offset: state.offset || "" };
}

async function load() {
  request?.abort();
  request = new AbortController();
  const values = query();
  setUrl(values);
  const wrong = ["step_min", "step_max", "reward_min", "reward_max"].find((key) => values[key] && !Number.isFinite(Number(values[key])));
  if (wrong) { state.total = 0; show([]); $("none").textContent = `“${values[wrong]}” is not a number.`; return; }
  const parameters = new URLSearchParams(Object.entries({ ...values, limit: LIMIT }).filter(([, value]) => value !== ""));
  $("csv").href = `${apiOf(name)}/episodes.csv?${parameters}`;
  $("episodes").classList.add("busy");
  try {
    const page = await fetchJson(`${apiOf(name)}/episodes?${parameters}`, { signal: request.signal });
    state.total = page.total;
    show(page.rows);
  } catch (error) {
    if (error.name === "AbortError") return;
    show([]);
    $("none").textContent = error.message;
  }
  $("episodes").classList.remove("busy");
}

function row(one) {
  const link = el("a", { class: "name", href: pageOf(name, "episode", one.episode_id) }, one.task_id || one.episode_id);
  const line = el("tr", {},
    el("td", { class: "num" }, one.validation ? el("span", { class: "tag", title: "from a validation" }, "val") : null, " ", number(one.step)),
    el("td", {}, link, el("span", { class: "preview", dir: "auto" }, one.preview)),
    el("td", {}, pill(one.status), one.outcomes.map((outcome) => el("span", { class: "tag" }, ` ${outcome}`)), one.failure ? el("span", { class: "preview" }, one.failure) : null),
    el("td", { class: `num strong ${rewardClass(one.reward)}` }, short(one.reward)),
    el("td", { class: `num ${signClass(one.advantage)}` }, signed(one.advantage)),
    el("td", { class: "num" }, number(one.turns)),
    el("td", {}, one.agents.slice(0, 3).join(", ") + (one.agents.length > 3 ? ` +${one.agents.length - 3}` : "")),
    el("td", {}, one.tag ? el("span", { class: "tag" }, one.tag) : ""),
    el("td", { class: "num" }, number(one.tokens)),
    el("td", { class: "num" }, one.sampled && !one.validation ? `${Math.round(100 * one.trained / one.sampled)} %` : "–"),
    el("td", { class: `num ${one.forks ? "warn" : "muted"}` }, number(one.forks)),
    el("td", { class: "num muted" }, seconds(one.seconds)),
    el("td", {}, one.group_id ? el("a", { href: pageOf(name, "group", one.group_id) }, "Group") : ""));
  line.addEventListener("click", (event) => { if (!event.target.closest("a") && !getSelection().toString()) link.click(); });
  return line;
}

function show(rows) {
  document.querySelector("#episodes tbody").replaceChildren(...rows.map(row));
  for (const head of document.querySelectorAll("th[data-sort]")) {
    if (head.dataset.sort === state.sort) head.setAttribute("aria-sort", state.order === "asc" ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  }
  const none = $("none");
  none.hidden = rows.length > 0;
  none.textContent = "No episodes match.";
  const last = state.offset + rows.length;
  $("count").textContent = rows.length ? `${number(state.offset + 1)}–${number(last)} of ${number(state.total)} episodes` : "0 episodes";
  $("previous").disabled = state.offset === 0;
  $("next").disabled = last >= state.total;
}

async function facets() {
  const found = await fetchJson(`${apiOf(name)}/facets`);
  const fill = (key, counts) => {
    const select = form.elements[key];
    const chosen = select.value || url.get(key) || "";
    select.replaceChildren(select.options[0], ...Object.entries(counts || {}).map(([value, count]) => el("option", { value }, `${value.replaceAll("_", " ")} (${number(count)})`)));
    if (chosen && ![...select.options].some((option) => option.value === chosen)) select.append(el("option", { value: chosen }, chosen));
    select.value = chosen;
  };
  fill("status", found.statuses); fill("agent", found.agents); fill("tag", found.tags); fill("failure", found.failures);
  return found.total;
}

const changed = () => { state.offset = 0; load(); };
const typed = debounce(changed, 180);
form.addEventListener("input", (event) => (event.target.matches("select") ? changed() : typed()));
form.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
form.addEventListener("reset", () => { for (const key of url.keys()) url.delete(key); setTimeout(() => { for (const input of form.elements) if ("value" in input) input.value = ""; changed(); }); });
for (const head of document.querySelectorAll("th[data-sort]")) {
  head.tabIndex = 0;
  const sort = () => {
    state.order = state.sort === head.dataset.sort && state.order === "desc" ? "asc" : "desc";
    state.sort = head.dataset.sort;
    changed();
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
}
$("previous").addEventListener("click", () => { state.offset = Math.max(0, state.offset - LIMIT); load(); scrollTo(0, 0); });
$("next").addEventListener("click", () => { state.offset += LIMIT; load(); scrollTo(0, 0); });
$("copy-link").addEventListener("click", copyLink);

for (const input of form.elements) if (input.name && url.has(input.name)) input.value = url.get(input.name);
// one request fills the choices, another the rows: whichever comes first, selects take their value from the URL
for (const key of ["status", "agent", "tag", "failure"]) if (url.get(key)) { form.elements[key].append(el("option", { value: url.get(key) }, url.get(key))); form.elements[key].value = url.get(key); }
let known = -1;
load();
poll(3, async () => {
  const { status } = await fetchJson(apiOf(name));
  showLive(status === "running");
  const total = await facets();
  if (known >= 0 && total !== known && state.offset === 0 && !document.activeElement?.closest("#episodes")) load();
  known = total;
});
