// Every token of one path through the tree. All lines have the same height, so only the visible ones are in the page.
import { ODD_ONE, el, hasOdd, number, oddName, short, signed } from "./common.js";

const LINE = 22, SPARE = 10, SPLIT = 4000;
const LOGPROB_STEPS = [0.02, 0.2, 0.6, 1.5, 3, 5];
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|[\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]/u;

export const COLOURS = {
  trained: { label: "Trained or masked", legend: [["m-trained", "trained"], ["m-masked", "sampled, no loss"], ["", "context"]] },
  logprob: { label: "Logprob", legend: [["q0", "certain"], ["q3", "−1"], ["q6", "−5 or less"]] },
  advantage: { label: "Advantage", legend: [["d0", "−2"], ["d3", "0"], ["d6", "+2"]] },
  ratio: { label: "Probability ratio", legend: [["d0", "0.8"], ["d3", "1"], ["d6", "1.25"]] },
};

/** The tokens from the root to the end of a call, flat: arrays by position. */
export function pathTokens(data, view, index) {
  const call = view.calls[index];
  const runs = [];
  for (let at = call.run >= 0 ? call.run : call.prompt_run; at >= 0; at = data.runs[at].parent) runs.unshift(at);
  const flat = { ids: [], text: [], call: [], offset: [], segments: [] };
  for (const at of runs) {
    const run = data.runs[at];
    const length = at === call.prompt_run && call.run < 0 ? call.prompt_tokens - run.start : run.ids.length;
    const before = flat.segments.at(-1);
    if (before && before.call === run.call && run.call < 0) before.length += length;
    else flat.segments.push({ start: flat.ids.length, call: run.call, length });
    const decoder = new TextDecoder();
    for (let i = 0; i < length; i++) {
      const piece = data.pieces[run.ids[i]];
      // a token may be part of a character: its text appears on the token that completes it
      const text = piece === undefined ? `⟨${run.ids[i]}⟩` : typeof piece === "string" ? piece : decoder.decode(new Uint8Array(piece), { stream: true }) || "·";
      flat.ids.push(run.ids[i]); flat.text.push(text); flat.call.push(run.call); flat.offset.push(i);
    }
  }
  return flat;
}

/** Lines of at most `columns` cells: `[[token, from, to] …]`, or a header line. */
export function layOut(flat, columns) {
  const lines = [];
  for (const segment of flat.segments) {
    if (!segment.length) continue;
    lines.push({ head: segment });
    let line = [], used = 0;
    const flush = () => { lines.push({ parts: line }); line = []; used = 0; };
    for (let token = segment.start; token < segment.start + segment.length; token++) {
      const text = flat.text[token];
      let from = 0, at = 0;
      const ascii = text.length < 64 && /^[\x20-\x7e]*$/.test(text);
      if (ascii && used + text.length <= columns) { line.push([token, 0, text.length]); used += text.length; continue; }
      while (at < text.length) {
        const character = String.fromCodePoint(text.codePointAt(at));
        if (character === "\n") {
          line.push([token, from, at + 1]);
          flush();
          at += 1; from = at;
          continue;
        }
        const width = ODD_ONE.test(character) ? oddName(character).length + 1 : character === "\t" ? 4 : WIDE.test(character) ? 2 : 1;
        if (used + width > columns && used) {
          if (at > from) line.push([token, from, at]);
          flush();
          from = at;
        }
        used += width;
        at += character.length;
      }
      if (at > from || !text.length) line.push([token, from, at]);
    }
    if (line.length) flush();
  }
  return lines;
}

export class TokenView {
  constructor(holder, view, data, { colour, onColour, onToken }) {
    this.view = view; this.data = data; this.onToken = onToken; this.chosen = -1; this.colour = COLOURS[colour] ? colour : "trained";
    this.space = el("div", { class: "space" });
    this.scroller = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens. Arrow keys move from token to token." }, this.space);
    this.inspector = el("aside", { class: "inspector", "aria-live": "polite", "aria-label": "The selected token" });
    this.scale = el("span", { class: "scale" });
    const buttons = Object.entries(COLOURS).map(([key, { label }]) => el("button", { type: "button", "data-colour": key, on: { click: () => { this.colour = key; onColour(key); this.recolour(); } } }, label));
    this.bar = el("div", { class: "token-bar" }, el("div", { class: "segments", role: "group", "aria-label": "Colour by" }, buttons), this.scale, el("span", { class: "spring" }), this.count = el("span"));
    holder.replaceChildren(el("div", { class: "token-pane" }, this.bar, this.scroller), this.inspector);
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.scroller.addEventListener("pointerover", (event) => { if (event.target.dataset?.t) this.inspect(Number(event.target.dataset.t)); });
    this.scroller.addEventListener("click", (event) => { const at = event.target.closest?.("[data-t]"); if (at) this.choose(Number(at.dataset.t)); });
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(this.scroller);
    this.recolour();
  }

  show(index, token = -1) {
    this.index = index;
    this.flat = pathTokens(this.data, this.view, index);
    this.count.textContent = `${number(this.flat.ids.length)} tokens on this path`;
    this.columns = 0;
    this.resize();
    this.chosen = -1;
    if (token >= 0 && token < this.flat.ids.length) this.choose(token, true);
    else { this.toCall(index); this.inspect(-1); }
  }

  resize() {
    if (!this.flat || !this.scroller.clientWidth) return;
    const probe = el("span", { class: "line" }, "0".repeat(100));
    probe.style.right = "auto";
    this.space.append(probe);
    const cell = probe.getBoundingClientRect().width / 100;
    probe.remove();
    const columns = Math.max(20, Math.floor((this.scroller.clientWidth - 40) / cell));
    if (columns === this.columns) return;
    this.columns = columns;
    this.lines = layOut(this.flat, columns);
    this.lineOf = new Map();
    this.lines.forEach((line, index) => { for (const [token] of line.parts || []) if (!this.lineOf.has(token)) this.lineOf.set(token, index); });
    this.space.style.height = `${this.lines.length * LINE + 40}px`;
    this.drawn = new Map();
    this.space.replaceChildren();
    this.draw();
  }

  /** Put the visible lines into the page and remove the others. */
  draw() {
    if (!this.lines) return;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / LINE) - SPARE);
    const last = Math.min(this.lines.length - 1, Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / LINE) + SPARE);
    for (const [index, node] of this.drawn) if (index < first || index > last) { node.remove(); this.drawn.delete(index); }
    const fresh = document.createDocumentFragment();
    for (let index = first; index <= last; index++) {
      if (this.drawn.has(index)) continue;
      const node = this.lineNode(this.lines[index]);
      node.style.top = `${8 + index * LINE}px`;
      this.drawn.set(index, node);
      fresh.append(node);
    }
    this.space.append(fresh);
  }

  lineNode(line) {
    if (line.head) {
      const call = this.view.calls[line.head.call];
      if (!call) return el("div", { class: "line head" }, "context", el("span", {}, `${number(line.head.length)} tokens`));
      return el("div", { class: "line head" }, el("span", { class: "who" }, call.agent), `call ${call.index}, turn ${call.turn}`, el("span", {}, `${number(line.head.length)} sampled${this.view.validation ? "" : `, ${number(call.trained)} trained`}`), call.advantage === null ? "" : `advantage ${signed(call.advantage)}`);
    }
    return el("div", { class: "line" }, line.parts.map(([token, from, to]) => {
      const node = el("span", { class: `tk ${this.classOf(token)}${token === this.chosen ? " on" : ""}`, "data-t": token });
      const text = this.flat.text[token].slice(from, to);
      if (text.endsWith("\n")) node.append(shown(text.slice(0, -1)), el("span", { class: "nl", "data-t": token }, "↵"));
      else node.append(shown(text));
      return node;
    }));
  }

  facts(token) {
    const index = this.flat.call[token], offset = this.flat.offset[token];
    if (index < 0) return { index: -1 };
    const recorded = this.data.calls[index], call = this.view.calls[index];
    const logprob = recorded.logprobs[offset] ?? undefined, trainer = recorded.trainer[offset] ?? undefined;
    const mask = recorded.mask[offset] === 1;
    const version = recorded.versions.findLast(([start]) => start <= offset)?.[1];
    return { index, call, logprob, trainer, mask, version, ratio: trainer === undefined || logprob === undefined ? undefined : Math.exp(trainer - logprob), advantage: mask && call.advantage !== null ? call.advantage : undefined };
  }

  classOf(token) {
    const facts = this.facts(token);
    if (facts.index < 0) return "m-ctx";
    if (this.colour === "trained") return facts.mask ? "m-trained" : "m-masked";
    if (this.colour === "logprob") return facts.logprob === undefined ? "" : `q${LOGPROB_STEPS.filter((limit) => -facts.logprob >= limit).length}`;
    const value = this.colour === "advantage" ? (facts.advantage === undefined ? undefined : facts.advantage / 2) : facts.ratio === undefined ? undefined : Math.log(facts.ratio) / Math.log(1.25);
    return value === undefined ? "" : `d${Math.max(0, Math.min(6, Math.round(3 + 3 * value)))}`;
  }

  recolour() {
    for (const button of this.bar.querySelectorAll("[data-colour]")) button.setAttribute("aria-pressed", button.dataset.colour === this.colour);
    this.scale.replaceChildren(...COLOURS[this.colour].legend.map(([name, label]) => el("span", {}, name ? el("i", { class: name }) : null, this.view.validation && label === "trained" ? "would be trained" : label)));
    if (this.drawn) { this.drawn = new Map(); this.space.replaceChildren(); this.draw(); }
  }

  inspect(token) {
    if (token === this.inspected) return;
    this.inspected = token;
    if (token < 0) { this.inspector.replaceChildren(el("p", { class: "help" }, "Point at a token to see its id, its logprobs, the probability ratio and its advantage. Click one to keep it in the link; move with the arrow keys."), el("h2", {}, "Jump to"), this.jumps()); return; }
    const facts = this.facts(token), id = this.flat.ids[token];
    const pairs = [["position", number(token)], ["id", id], ["author", facts.index < 0 ? "context" : `${facts.call.agent}, call ${facts.index}`]];
    if (facts.index >= 0) pairs.push(
      ["trained", this.view.validation ? "no: validation" : facts.mask ? "yes" : `no: ${(facts.call.drop || (facts.call.trainable ? "masked" : "not trainable")).replaceAll("_", " ")}`],
      ["logprob, sampler", facts.logprob === undefined ? "–" : `${number(facts.logprob)}  (${(100 * Math.exp(facts.logprob)).toFixed(1)} %)`],
      ["logprob, trainer", facts.trainer === undefined ? "–" : number(facts.trainer)], ["ratio", facts.ratio === undefined ? "–" : short(facts.ratio)],
      ["advantage", signed(facts.advantage)], ["weight", facts.call.weight === null ? "–" : short(facts.call.weight)], ["policy version", facts.version ?? "–"]);
    this.inspector.replaceChildren(el("div", { class: "big" }, shown(this.flat.text[token].slice(0, 400)) || "", this.flat.text[token] === "" ? el("span", { class: "muted" }, "empty") : ""),
      el("dl", {}, pairs.flatMap(([label, value]) => [el("dt", {}, label), el("dd", {}, String(value))])), el("h2", {}, "Jump to"), this.jumps());
  }

  jumps() {
    return el("div", {}, this.flat.segments.filter((segment) => segment.call >= 0).map((segment) => {
      const call = this.view.calls[segment.call];
      return el("button", { class: "more", type: "button", on: { click: () => this.toToken(segment.start) } }, `${call.agent}, turn ${call.turn}`, " ");
    }).flatMap((button) => [button, el("br")]));
  }

  choose(token, scroll = false) {
    for (const node of this.space.querySelectorAll(".tk.on")) node.classList.remove("on");
    this.chosen = token;
    if (scroll) this.toToken(token);
    for (const node of this.space.querySelectorAll(`.tk[data-t="${token}"]`)) node.classList.add("on");
    this.inspect(token);
    this.onToken(token);
  }

  key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "down", ArrowUp: "up", Home: "home", End: "end" };
    const move = moves[event.key];
    if (move === undefined || event.ctrlKey || event.metaKey || !this.flat.ids.length) return;
    event.preventDefault();
    let next = this.chosen;
    if (typeof move === "number") next += move;
    else if (move === "home") next = 0;
    else if (move === "end") next = this.flat.ids.length - 1;
    else { let line = (this.lineOf.get(this.chosen) ?? 0) + (move === "down" ? 1 : -1); while (this.lines[line]?.head) line += move === "down" ? 1 : -1; next = this.lines[line]?.parts[0]?.[0] ?? next; }
    next = Math.max(0, Math.min(this.flat.ids.length - 1, next));
    this.choose(next);
    const top = this.lineOf.get(next) * LINE;
    if (top < this.scroller.scrollTop + LINE || top > this.scroller.scrollTop + this.scroller.clientHeight - 3 * LINE) this.toToken(next);
  }

  toToken(token) { this.scroller.scrollTop = Math.max(0, (this.lineOf.get(token) ?? 0) * LINE - 3 * LINE); this.draw(); }
  toCall(index) { const segment = this.flat.segments.find((one) => one.call === index); if (segment) this.toToken(segment.start); else this.scroller.scrollTop = 0; }
}

/** A token's text with invisible characters made visible. */
function shown(text) {
  const visible = text.length > SPLIT ? `${text.slice(0, SPLIT)}…` : text;
  if (!hasOdd(visible)) return visible.replaceAll("\t", "→   ");
  return [...visible].map((character) => ODD_ONE.test(character) ? `‹${oddName(character).slice(2)}›` : character).join("");
}
