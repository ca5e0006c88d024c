// A list that the server filters, sorts and pages, with its whole state in the URL.
import { $, apiOf, debounce, fetchJson, number, poll, setUrl, showLive } from "./common.js";

const LIMIT = 100;

export class List {
  /** `api`: where pages come from; `table`: the table's id; `row`: a record's line; `sort`, `order`: the usual ones; `numbers`: filters that must be numbers; `noun`: [one, many]; `outgoing`: the filters as the server wants them. */
  constructor({ api, table, row, sort, order, numbers, noun, outgoing = (values) => values }) {
    this.about = { api, row, sort, order, numbers, noun, outgoing };
    this.table = $(table);
    this.form = $("filters");
    this.url = new URLSearchParams(location.search);
    this.sort = this.url.get("sort") || sort;
    this.order = this.url.get("order") || order;
    this.offset = Number(this.url.get("offset") || 0);
    this.total = 0;
    this.listen();
  }

  query() {
    const values = Object.fromEntries([...new FormData(this.form)].map(([key, value]) => [key, String(value).trim()]));
    return { ...values, sort: this.sort === this.about.sort ? "" : this.sort, order: this.order === this.about.order ? "" : this.order, offset: this.offset || "" };
  }

  async load() {
    this.request?.abort();
    this.request = new AbortController();
    const values = this.query();
    setUrl(values);
    const wrong = this.about.numbers.find((key) => values[key] && !Number.isFinite(Number(values[key])));
    this.table.classList.toggle("busy", !wrong);
    if (wrong) { this.total = 0; this.show([]); $("none").textContent = `“${values[wrong]}” is not a number.`; return; }
    const parameters = new URLSearchParams(Object.entries({ ...this.about.outgoing(values), limit: LIMIT }).filter(([, value]) => value !== ""));
    $("csv").href = `${this.about.api}.csv?${parameters}`;
    try {
      const page = await fetchJson(`${this.about.api}?${parameters}`, { signal: this.request.signal });
      this.total = page.total;
      this.show(page.rows);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.total = 0;
      this.show([]);
      $("none").textContent = error.message;
    }
    this.table.classList.remove("busy");
  }

  show(rows) {
    this.table.tBodies[0].replaceChildren(...rows.map(this.about.row));
    for (const head of this.table.querySelectorAll("th[data-sort]")) {
      if (head.dataset.sort === this.sort) head.setAttribute("aria-sort", this.order === "asc" ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const [one, many] = this.about.noun;
    const none = $("none");
    none.hidden = rows.length > 0;
    none.textContent = `No ${many} match.`;
    const last = this.offset + rows.length;
    $("count").textContent = rows.length ? `${number(this.offset + 1)}–${number(last)} of ${number(this.total)} ${this.total === 1 ? one : many}` : `0 ${many}`;
    $("previous").disabled = this.offset === 0;
    $("next").disabled = last >= this.total;
  }

  /** Offer these values (with counts) in a select, and keep what is chosen. */
  offer(key, counts, label = (value) => value.replaceAll("_", " ")) {
    const select = this.form.elements[key], fixed = [...select.options].filter((option) => !option.dataset.offered);
    const chosen = select.value || this.url.get(key) || "";
    const offered = Object.entries(counts || {}).map(([value, count]) => { const option = new Option(`${label(value)} (${number(count)})`, value); option.dataset.offered = "1"; return option; });
    select.replaceChildren(...fixed, ...offered);
    if (chosen && ![...select.options].some((option) => option.value === chosen)) { const option = new Option(label(chosen), chosen); option.dataset.offered = "1"; select.append(option); }
    select.value = chosen;
  }

  /** Keep the list up to date. `offer(facets)`: fill the choices with what there is. */
  follow(name, offer) {
    let known = "";
    poll(3, async () => {
      const { status } = await fetchJson(apiOf(name));
      showLive(status === "running");
      const facets = await fetchJson(`${apiOf(name)}/facets`), found = JSON.stringify(facets);
      offer(facets);
      if (known && found !== known) this.refresh();
      known = found;
    });
  }

  /** Load again because there may be new rows, unless the reader is in the middle of the list. */
  refresh() { if (this.offset === 0 && !document.activeElement?.closest(`#${this.table.id}`)) this.load(); }

  listen() {
    const changed = () => { this.offset = 0; this.load(); };
    const typed = debounce(changed, 180);
    this.form.addEventListener("input", (event) => (event.target.matches("select") ? changed() : typed()));
    this.form.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
    this.form.addEventListener("reset", () => {
      for (const key of [...this.url.keys()]) this.url.delete(key);
      setTimeout(() => { for (const input of this.form.elements) if ("value" in input) input.value = input.options?.[0].value ?? ""; changed(); });
    });
    for (const head of this.table.querySelectorAll("th[data-sort]")) {
      head.tabIndex = 0;
      const sort = () => {
        this.order = this.sort === head.dataset.sort && this.order === "desc" ? "asc" : "desc";
        this.sort = head.dataset.sort;
        changed();
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
    }
    this.table.tBodies[0].addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row && !event.target.closest("a") && !getSelection().toString()) row.querySelector("a.name").click();
    });
    const turn = (pages) => { this.offset = Math.max(0, this.offset + pages * LIMIT); this.load(); scrollTo(0, 0); };
    $("previous").addEventListener("click", () => turn(-1));
    $("next").addEventListener("click", () => turn(1));
    for (const input of this.form.elements) {
      if (!input.name || !this.url.has(input.name)) continue;
      // one request fills the choices, another the rows: whichever comes first, selects take their value from the URL
      input.value = this.url.get(input.name);
      if (input.matches("select")) this.offer(input.name, {});
    }
  }
}
