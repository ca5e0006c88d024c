// Markdown, code and LaTeX of messages as nodes. Text enters them through text nodes only, so no HTML of a message is
// ever read as HTML; formulas are shown as their source. What isn't understood stays as it was written.
import { appendText, el } from "./common.js";

const DEEPEST = 6;
// each alternative is bounded, so that no text makes a search long: code, formulas, links, bold, italic, struck
const INLINE = new RegExp([
  "(?<code>(`{1,3})(?!`)[^\\n]{1,1000}?(?<!`)\\2(?!`))",
  "(?<math>\\$\\$[^$]{1,2000}\\$\\$|\\$(?=[^\\s$])[^$\\n]{0,500}(?<=[^\\s\\\\])\\$(?![\\d$])|\\\\\\([^\\n]{1,2000}?\\\\\\)|\\\\\\[[^\\n]{1,2000}?\\\\\\]|\\\\boxed\\{[^{}\\n]{0,300}\\})",
  "(?<link>\\[(?<name>[^\\[\\]\\n]{1,300})\\]\\((?<href>https?:\\/\\/[^\\s()<>]{1,1000})\\))",
  "(?<bold>\\*\\*(?=[^\\s*])[^\\n]{1,1000}?(?<=[^\\s*])\\*\\*|(?<![\\w_])__(?=[^\\s_])[^\\n]{1,1000}?(?<=[^\\s_])__(?![\\w_]))",
  "(?<italic>\\*(?=[^\\s*])[^*\\n]{1,1000}?(?<=[^\\s*])\\*(?![\\w*])|(?<![\\w_])_(?=[^\\s_])[^_\\n]{1,1000}?(?<=[^\\s_])_(?![\\w_]))",
  "(?<struck>~~(?=[^\\s~])[^~\\n]{1,1000}~~)",
].join("|"), "g");

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const MATH = [[/^\s*\$\$/, /\$\$\s*$/], [/^\s*\\\[/, /\\\]\s*$/], [/^\s*\\begin\{(?:align|equation|gather|cases|matrix|pmatrix|bmatrix)\*?\}/, /\\end\{[a-z]{1,20}\*?\}\s*$/]];

/** Fill a node with a text's nodes. */
export function appendMarkdown(node, text) {
  node.append(...blocks(text.replaceAll("\r\n", "\n").split("\n"), 0));
  return node;
}

function inline(node, text, depth = 0) {
  let last = 0;
  if (depth < DEEPEST) for (const match of text.matchAll(INLINE)) {
    appendText(node, text.slice(last, match.index));
    last = match.index + match[0].length;
    const { code, math, link, name, href, bold, italic } = match.groups, whole = match[0];
    if (code) node.append(appendText(el("code"), whole.slice(match[2].length, -match[2].length)));
    else if (math) node.append(appendText(el("code", { class: "math", title: "LaTeX" }), bare(whole)));
    else if (link) node.append(inline(el("a", { href, rel: "noopener noreferrer", target: "_blank", title: href }), name, depth + 1));
    else if (bold) node.append(inline(el("strong"), whole.slice(2, -2), depth + 1));
    else if (italic) node.append(inline(el("em"), whole.slice(1, -1), depth + 1));
    else node.append(inline(el("s"), whole.slice(2, -2), depth + 1));
  }
  return appendText(node, text.slice(last));
}

/** A formula without its delimiters. */
const bare = (text) => (text.startsWith("\\boxed") ? text : text.startsWith("$") && !text.startsWith("$$") ? text.slice(1, -1) : text.slice(2, -2));

function blocks(lines, depth) {
  const nodes = [];
  let at = 0, paragraph = [];
  const flush = () => { if (paragraph.length) nodes.push(inline(el("p"), paragraph.join("\n"))); paragraph = []; };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (!line.trim()) { flush(); at++; continue; }
    if (fence) {
      flush();
      const end = lines.findIndex((one, index) => index > at && one.trim().startsWith(fence[1]) && !one.trim().slice(fence[1].length).replaceAll(fence[1][0], ""));
      const stop = end < 0 ? lines.length : end;
      nodes.push(el("pre", { class: "fenced", tabindex: "0", "data-language": fence[2] || undefined }, appendText(el("code"), lines.slice(at + 1, stop).join("\n"))));
      at = stop + 1;
      continue;
    }
    const math = MATH.find(([begin]) => begin.test(line));
    if (math) {
      const rest = line.replace(math[0], "");
      const end = math[1].test(rest) ? at : lines.findIndex((one, index) => index > at && math[1].test(one));
      if (end >= 0) {
        flush();
        const formula = lines.slice(at, end + 1).join("\n").trim();
        nodes.push(appendText(el("pre", { class: "math", title: "LaTeX", tabindex: "0" }), formula.startsWith("\\begin") ? formula : formula.slice(2, -2).trim()));
        at = end + 1;
        continue;
      }
    }
    if (heading) { flush(); nodes.push(inline(el("p", { class: `heading-${heading[1].length}`, role: "heading", "aria-level": String(heading[1].length + 1) }), heading[2])); at++; continue; }
    if (RULE.test(line)) { flush(); nodes.push(el("hr")); at++; continue; }
    if (depth < DEEPEST && QUOTE.test(line)) {
      flush();
      const inner = [];
      for (let quote; at < lines.length && (quote = QUOTE.exec(lines[at])); at++) inner.push(quote[1]);
      nodes.push(el("blockquote", {}, blocks(inner, depth + 1)));
      continue;
    }
    if (line.includes("|") && isDivider(lines[at + 1])) {
      flush();
      const head = cells(line), body = [];
      for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].trim(); at++) body.push(cells(lines[at]));
      const row = (kind, values) => el("tr", {}, head.map((_, index) => inline(el(kind), values[index] ?? "")));
      nodes.push(el("div", { class: "scroll", tabindex: "0" }, el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, body.map((values) => row("td", values))))));
      continue;
    }
    if (depth < DEEPEST && ITEM.test(line)) {
      flush();
      const [list, next] = listAt(lines, at, depth);
      nodes.push(list);
      at = next;
      continue;
    }
    paragraph.push(line);
    at++;
  }
  flush();
  return nodes;
}

/** The list that begins at a line, and the line after it. An item holds the lines that are indented below it. */
function listAt(lines, at, depth) {
  const [, , bullet, start] = ITEM.exec(lines[at]);
  const indent = ITEM.exec(lines[at])[1].length;
  const list = el(bullet ? "ul" : "ol", { start: start && start !== "1" ? start : undefined });
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length !== indent || Boolean(item[2]) !== Boolean(bullet) || RULE.test(lines[at])) break;
    const inner = [item[4]];
    const within = (line) => line !== undefined && line.trim() && /^\s*/.exec(line)[0].length > indent;
    for (at++; at < lines.length && (within(lines[at]) || (!lines[at].trim() && within(lines[at + 1]))); at++) inner.push(lines[at].slice(Math.min(indent + 2, /^\s*/.exec(lines[at])[0].length)));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
    list.append(el("li", {}, blocks(inner, depth + 1)));
  }
  return [list, at];
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
const isDivider = (line) => Boolean(line?.includes("-")) && line.includes("|") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
