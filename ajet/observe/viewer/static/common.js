// Helpers for every page. Text from models enters a page through text nodes only.

const SVG = new Set(["svg", "path", "circle", "rect", "line", "text", "g"]);

/** An element with attributes and children (strings become text nodes). */
export function el(name, attributes = {}, ...children) {
  const node = SVG.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const $ = (id) => document.getElementById(id);
export const experiment = () => document.body.dataset.experiment;
export const apiOf = (name) => `/api/x/${encodeURIComponent(name)}`;
export const pageOf = (name, ...rest) => [`/x/${encodeURIComponent(name)}`, ...rest.map(encodeURIComponent)].join("/");

/** The names of runs as addresses hold them, and back. A name may contain a comma. */
export const runsText = (names) => names.map(encodeURIComponent).join(",");
export const runsIn = (text) => (text || "").split(",").filter(Boolean).map(decodeURIComponent);

/** JSON from this server. */
export const fetchJson = async (url, options = {}) => (await fetchAnswer(url, options)).json();

/** An answer of this server; an error carries the server's message. */
export async function fetchAnswer(url, options = {}) {
  const answer = await fetch(url, options);
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || answer.statusText);
  return answer;
}

/** Call `work` now and every `seconds` while the page is visible, until it returns false. */
export function poll(seconds, work) {
  let stopped = false;
  const turn = async () => {
    if (stopped) return;
    let goOn = true;
    try { if (!document.hidden) goOn = await work(); showLost(null); } catch (error) { if (error.name !== "AbortError") { console.error(error); showLost(error); } }
    if (goOn === false) return;
    setTimeout(turn, seconds * 1000);
  };
  turn();
  return () => { stopped = true; };
}

function showLost(lost) {
  const live = $("live");
  if (!lost && live.dataset.lost) { live.hidden = true; live.title = ""; delete live.dataset.lost; }
  if (!lost) return;
  live.dataset.lost = "1";
  live.hidden = false;
  live.className = "pill bad";
  // fetch throws a TypeError where nothing answers
  live.textContent = lost instanceof TypeError ? "viewer stopped" : "can't be read";
  live.title = lost.message;
}

export function showLive(running) {
  const live = $("live");
  live.hidden = !running;
  live.className = "pill good running";
  live.textContent = "live";
}

/** A colour or number of the page's style sheet. */
export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---------------------------------------------------------------- numbers and times

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isSafeInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}
export const short = (value) => number(value, 3);
/** `1 step`, `2 steps`. */
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
export const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
export const percent = (share) => share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`;
export const signed = (value) => value === null || value === undefined ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value), 3);
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 9.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor(whole % 3600 / 60)).padStart(2, "0")} min`;
}
export function ago(time) {
  if (!time) return "–";
  const passed = Date.now() / 1000 - time;
  if (passed < 90) return "now";
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return new Date(time * 1000).toISOString().slice(0, 10);
}
export const clock = (time) => new Date(time * 1000).toLocaleString("sv");

// ---------------------------------------------------------------- parts

/** Models differ in the end of their path, not its start. */
export const modelName = (model) => /^[/.~]/.test(model || "") ? `…/${model.split("/").filter(Boolean).slice(-2).join("/")}` : model;

const STATUS = { completed: "good", running: "good running", truncated: "warn", killed: "warn", interrupted: "warn", cancelled: "warn", unknown: "" };
export const pill = (status) => el("span", { class: `pill ${STATUS[status] ?? "bad"}` }, String(status).replaceAll("_", " "));
export const rewardClass = (reward) => reward === null || reward === undefined ? "muted" : reward > 0 ? "good" : reward < 0 ? "bad" : "";
export const signClass = (value) => value > 0 ? "good" : value < 0 ? "bad" : "muted";

/** The class with each agent's colour: the same on all pages that list the agents in the same order. */
export function agentColours(names) {
  const unique = [...new Set(names)];
  return (name) => `a${Math.max(0, unique.indexOf(name)) % 8}`;
}

/** A small line. `range`: what its height stands for; else from the lowest value to the highest. */
export function spark(values, label, range = null) {
  const svg = el("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", role: "img", "aria-label": label });
  const low = range ? range[0] : Math.min(...values), span = (range ? range[1] : Math.max(...values)) - low || 1;
  if (values.length > 1) {
    const points = values.map((value, i) => `${(100 * i / (values.length - 1)).toFixed(1)},${(26 - 24 * (value - low) / span).toFixed(1)}`);
    svg.append(el("path", { d: `M${points.join("L")}` }));
  } else if (values.length) svg.append(el("circle", { cx: 50, cy: 26 - 24 * (values[0] - low) / span, r: 1.5 }));
  return svg;
}

/** Spread the cards of a grid evenly over its rows, so that none stands alone beside empty places. */
export function fillRows(grid, least = 340, gap = 14) {
  const spread = () => {
    const cards = [...grid.children].filter((card) => !card.hidden), most = Math.max(1, Math.floor((grid.clientWidth + gap) / (least + gap)));
    const rows = Math.ceil(cards.length / most), each = Math.floor(cards.length / rows), longer = cards.length % rows;
    cards.forEach((card, index) => {
      const columns = index < longer * (each + 1) ? each + 1 : each;
      card.style.width = `calc((100% - ${(columns - 1) * gap}px) / ${columns} - 0.1px)`;
    });
  };
  new ResizeObserver(spread).observe(grid);
  new MutationObserver(spread).observe(grid, { childList: true, subtree: true, attributeFilter: ["hidden"] });
  return grid;
}

export function toast(text) {
  const box = $("toast");
  box.textContent = text;
  box.classList.add("shown");
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => box.classList.remove("shown"), 1600);
}
export async function copy(text, what) {
  try { await navigator.clipboard.writeText(text); } catch {
    // a page served to another machine over plain HTTP has no clipboard API
    const area = el("textarea", { class: "visually-hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(`${what} copied`);
}
export const copyLink = () => copy(location.href, "Link");

/** Put these values into the URL without leaving the page; empty ones are removed. */
export function setUrl(values) {
  const url = new URL(location.href);
  for (const [key, value] of Object.entries(values)) {
    if (value === "" || value === null || value === undefined) url.searchParams.delete(key);
    else url.searchParams.set(key, value);
  }
  if (url.href !== location.href) history.replaceState(null, "", url);
}

/** Call what belongs to a key when it is pressed, but not while the reader types. */
export function onKeys(handlers) {
  addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    handlers[event.key]?.(event);
  });
}

export function debounce(work, milliseconds) {
  let timer;
  return (...values) => { clearTimeout(timer); timer = setTimeout(() => work(...values), milliseconds); };
}

// ---------------------------------------------------------------- text of models

// control characters, and those that reorder or hide text, are shown by name
export const ODD_ONE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/u;
const ODD = new RegExp(ODD_ONE.source, "gu");
const SHOWN_CHARACTERS = 20000;
export const oddName = (character) => `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
export const hasOdd = (text) => text.search(ODD) >= 0;

/** Append text to a node, with deceptive characters made visible. */
export function appendText(node, text) {
  let last = 0;
  for (const match of text.matchAll(ODD)) {
    if (match.index > last) node.append(text.slice(last, match.index));
    node.append(el("span", { class: "ctl", title: "a non-printing character" }, oddName(match[0])));
    last = match.index + match[0].length;
  }
  if (last < text.length) node.append(text.slice(last));
  return node;
}

/** Show what was asked, as the title of a page. */
export function showQuery(text, node = $("query")) {
  node.replaceChildren();
  appendText(node, text).dir = "auto";
}

export const isLong = (text) => text.length > SHOWN_CHARACTERS;

/** A block of text. A very long one shows its start, and the rest on demand. */
export const textBlock = (text, className = "text") => appendLong(el("div", { class: className, dir: "auto" }), text);

/** Append text to a node; of a very long one its start, and the rest on demand. */
export function appendLong(block, text) {
  if (text.length <= SHOWN_CHARACTERS) return appendText(block, text);
  appendText(block, text.slice(0, SHOWN_CHARACTERS));
  const rest = el("button", { class: "more", type: "button" }, `… show ${(text.length - SHOWN_CHARACTERS).toLocaleString("en")} more characters`);
  let shown = SHOWN_CHARACTERS;
  rest.addEventListener("click", () => {
    const next = Math.min(text.length, shown + 10 * SHOWN_CHARACTERS);
    rest.before(appendText(el("span"), text.slice(shown, next)));
    shown = next;
    if (shown >= text.length) rest.remove();
    else rest.textContent = `… show ${(text.length - shown).toLocaleString("en")} more characters`;
  });
  block.append(rest);
  return block;
}
