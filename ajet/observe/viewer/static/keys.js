// `?` lists the keys of a page, `/` goes to its search. And the button that copies the page's address.
import { $, copyLink, el, onKeys } from "./common.js";

const KEYS = [["?", "show these keys"], ["/", "search on this page"], ["h", "all experiments"]];
const ON_EPISODE = [["j", "next episode"], ["k", "previous episode"], ["← →", "move over tabs, or over tokens"], ["↑ ↓", "move over lines of tokens"]];
const ON_DIFFERENCES = [["n", "the first difference"]];
const ON_CHARTS = [["drag", "zoom all charts"], ["double-click", "reset the zoom"], ["click", "the episodes of a step"]];

function list() {
  const rows = [...KEYS, ...($("episode") ? ON_EPISODE : []), ...($("charts-page") ? ON_CHARTS : []), ...($("differences-page") ? ON_DIFFERENCES : [])];
  const dialog = el("dialog", { id: "keys", class: "card pad", "aria-label": "Keys" }, el("h2", {}, "Keys"),
    el("dl", { class: "key-list" }, rows.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    el("form", { method: "dialog" }, el("button", { class: "button" }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

$("copy-link")?.addEventListener("click", copyLink);
function toSearch(event) {
  const search = document.querySelector("input[type=search]");
  if (search) { event.preventDefault(); search.focus(); }
}
onKeys({ "?": () => { if (!$("keys")) list(); }, "/": toSearch, h: () => { location.href = "/"; } });
