// A chart's two buttons: save what is drawn as PNG or as SVG.
import { el, toast } from "./common.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const pageColours = () => ({ surface: style("--surface"), text: style("--text"), muted: style("--muted"), line: style("--line"), accent: style("--accent") });

function download(href, name, kind) { el("a", { href, download: `${`${name}`.replaceAll(/[^\w.-]+/g, "_")}.${kind}` }).click(); }

/** What is drawn on a canvas, on the page's background. */
function savePng(canvas, name) {
  const image = el("canvas", { width: canvas.width, height: canvas.height }), pen = image.getContext("2d");
  pen.fillStyle = style("--surface");
  pen.fillRect(0, 0, image.width, image.height);
  pen.drawImage(canvas, 0, 0);
  download(image.toDataURL("image/png"), name, "png");
}

function saveSvg(text, name) {
  const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  download(address, name, "svg");
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** `ready()`: draws what isn't drawn yet, and says whether there is anything; `canvas()`: what is drawn; `svg()`: the same as text; `name()`: the file's name. */
export function saveButtons(title, { ready, canvas, svg, name }) {
  const button = (kind, work) => {
    const click = async () => { if (await ready()) work(); else toast("Nothing saved: the chart has no data yet. Is the viewer still running?"); };
    return el("button", { class: "save", type: "button", title: `Save as ${kind}`, "aria-label": `Save ${title} as ${kind}`, on: { click } }, kind);
  };
  return el("span", { class: "saves" }, button("PNG", () => savePng(canvas(), name())), button("SVG", () => saveSvg(svg(), name())));
}
