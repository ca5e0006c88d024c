// What charts over steps have in common: one pointer and one zoom, and two buttons that save what is drawn.
import { el, style, toast } from "./common.js";

const HEIGHT = 186;
const INCREMENTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000];
const sizeOf = (node) => ({ width: Math.max(100, node.clientWidth), height: HEIGHT });

/**
 * What uPlot wants to know of a chart in `node`. `left`: of its vertical axis; `legend(index)`: says what is under the
 * pointer; `zoomTo(from, to)`: the steps that were dragged over, or nulls; `pick(index)`: a point was clicked.
 */
export function plotOptions(node, { grid, left, range, series, points, legend, zoomTo, pick, hooks = {} }) {
  const axis = { stroke: style("--muted"), font: "11px system-ui", gap: 4, grid, ticks: { show: false } };
  return {
    ...sizeOf(node), legend: { show: false }, padding: [8, 20, 0, 0],
    cursor: { sync: { key: "steps", setSeries: false }, y: false, drag: { x: true, y: false, setScale: false }, points },
    scales: { x: { time: false }, y: { range } },
    axes: [{ ...axis, size: 24, label: "step", labelSize: 16, labelGap: 0, labelFont: "11px system-ui", incrs: INCREMENTS }, { ...axis, size: 46, ...left }],
    series: [{}, ...series],
    hooks: {
      ...hooks,
      setCursor: [(plot) => legend(plot.cursor.idx ?? null)],
      setSelect: [(plot) => {
        const { left: start, width } = plot.select;
        if (width > 4) zoomTo(Math.round(plot.posToVal(start, "x")), Math.round(plot.posToVal(start + width, "x")));
        plot.setSelect({ width: 0, height: 0 }, false);
      }],
      ready: [(plot) => {
        let down = 0;
        plot.over.addEventListener("dblclick", () => zoomTo(null, null));
        plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
        plot.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - down) < 3 && event.detail === 1) pick(plot.posToIdx(event.offsetX)); });
      }],
    },
  };
}

export const resizePlot = (uplot, node) => uplot?.setSize(sizeOf(node));

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
