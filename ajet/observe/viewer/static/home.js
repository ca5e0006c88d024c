// The list of experiments, kept up to date. Selected ones can be compared.
import { $, ago, appendText, clock, el, fetchJson, modelName, number, pageOf, pill, poll, rewardClass, runsText, short, spark } from "./common.js";
import { tagNode } from "./notes.js";

const chosen = new Set();
let experiments = [];

function row(one) {
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${one.name}` });
  box.checked = chosen.has(one.name);
  box.addEventListener("change", () => { box.checked ? chosen.add(one.name) : chosen.delete(one.name); showChosen(); });
  const link = el("a", { class: "name", href: pageOf(one.name) }, one.name);
  const about = [one.backbone, one.algorithm, modelName(one.model)].filter(Boolean).join(" · ");
  const line = el("tr", {},
    el("td", { class: "check" }, box),
    el("td", {}, link, one.note ? el("span", { class: "noted", title: one.note, "aria-label": "has a note" }, "✎") : null, one.tags.map(tagNode), el("span", { class: "preview", title: one.model }, about), one.problem ? appendText(el("span", { class: "bad wrap problem-line" }), one.problem) : null),
    el("td", {}, pill(one.status), one.problem ? [" ", pill("damaged")] : null),
    el("td", { class: "num" }, number(one.step)),
    el("td", { class: `num strong ${rewardClass(one.return)}` }, short(one.return)),
    el("td", { class: "spark-cell" }, spark(one.spark, `return of ${one.name} so far`)),
    el("td", { class: "num" }, one.success === null ? "–" : `${(100 * one.success).toFixed(0)} %`),
    el("td", { class: "num" }, number(one.episodes)),
    el("td", { class: "num muted", title: one.touched ? clock(one.touched) : "" }, ago(one.touched)));
  line.addEventListener("click", (event) => { if (!event.target.closest("a, input")) link.click(); });
  return line;
}

function showChosen() {
  const link = $("compare");
  const names = [...chosen];
  link.setAttribute("aria-disabled", names.length < 2);
  if (names.length < 2) link.removeAttribute("href");
  else link.href = `/compare?runs=${runsText(names.map(encodeURIComponent))}`;
  link.textContent = names.length < 2 ? "Compare" : `Compare ${names.length}`;
}

function show() {
  const wanted = $("find").value.trim().toLowerCase();
  const shown = experiments.filter((one) => `${one.name} ${one.model} ${one.tags.join(" ")}`.toLowerCase().includes(wanted));
  document.querySelector("#experiments tbody").replaceChildren(...shown.map(row));
  $("none").hidden = shown.length > 0;
  showChosen();
}

$("find").addEventListener("input", show);
poll(3, async () => {
  const fresh = await fetchJson("/api/experiments");
  if (JSON.stringify(fresh) !== JSON.stringify(experiments)) { experiments = fresh; if (!document.activeElement.matches?.("#experiments input")) show(); }
  if (!fresh.length) show();
});
