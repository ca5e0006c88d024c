"""The board as a page: for each row of the matrix its curve over the seeds, its figures, and what changed.

`board_html` is a fragment that takes text colour and font from the page around it; `write_page` makes a page of it.
It has no scripts and loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ajet.observe.board_matrix import MatrixRow
from ajet.observe.board_records import outside_band, read_record
from ajet.schema import __version__
from ajet.schema.printable import printable

WIDTH, HEIGHT = 320, 150
LEFT, RIGHT, TOP, BOTTOM = 34, 8, 8, 22
STYLE = """\
.board{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,310px),1fr));gap:14px;margin:16px 0;
--line:#4453d6;--bad:#b3261e}
@media (prefers-color-scheme:dark){.board{--line:#9aa4ff;--bad:#ff8a80}}
[data-md-color-scheme=default] .board{--line:#4453d6;--bad:#b3261e}
[data-md-color-scheme=slate] .board{--line:#9aa4ff;--bad:#ff8a80}
.board section{border:1px solid color-mix(in srgb,currentColor 18%,transparent);border-radius:8px;
padding:12px;min-width:0}
.board h3{margin:0;font-size:16px}
.board p{margin:3px 0;font-size:12px;opacity:.75;overflow-wrap:anywhere}
.board p.bad{color:var(--bad);opacity:1}
.board svg{width:100%;height:auto;display:block;font-size:10px}
.board svg text{fill:currentColor;opacity:.7}
.board svg .grid{stroke:currentColor;opacity:.14}
.board svg .mean{stroke:var(--line);fill:none;stroke-width:1.8}
.board svg .training{stroke:var(--line);fill:none;opacity:.4}
.board svg .seeds{fill:var(--line);opacity:.16}
.board svg circle{fill:var(--line)}
.board .figures{width:100%;border-collapse:collapse;border:0;font-size:12px;font-variant-numeric:tabular-nums}
.board .figures :is(th,td){padding:2px 0 2px 8px;border:0;text-align:right;font-weight:400;white-space:nowrap}
.board .figures th:first-child{padding-left:0;text-align:left;white-space:normal}
.board .figures thead th{opacity:.6}"""
PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>AgentJet board</title>
<style>
:root{{color-scheme:light dark}}
body{{font:16px/1.45 system-ui,sans-serif;margin:0 auto;max-width:75rem;padding:1rem;background:#fff;color:#1c1e26}}
@media (prefers-color-scheme:dark){{body{{background:#16181f;color:#e6e7ec}}}}
</style></head>
<body><h1>Board</h1><p>ajet {version}. {legend}</p>
{board}
</body></html>
"""
LEGEND = (
    "The line with dots is the mean validation return over the seeds, its band reaches from the lowest to the highest, "
    "and the pale line is training."
)


class BoardFigure(NamedTuple):
    """A figure of the table."""

    name: str
    label: str
    form: str = ",.0f"


TABLE = (
    BoardFigure("start", "return before", ".3f"),
    BoardFigure("end", "return after", ".3f"),
    BoardFigure("steps_to_80", "steps to 80 %"),
    BoardFigure("sampler_gap", "engine against trainer", ".1e"),
    BoardFigure("tokens", "sampled tokens"),
    BoardFigure("seconds", "seconds"),
    BoardFigure("cpu_seconds", "CPU seconds"),
    BoardFigure("memory_mib", "peak memory, MiB"),
)

Record = Mapping[str, Any]


def write_page(rows: Sequence[MatrixRow], records: Path, folder: Path) -> Path:
    """Write `index.html`. Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "index.html"
    file.write_text(PAGE.format(version=__version__, legend=LEGEND, board=board_html(rows, records)), encoding="utf-8")
    return file


def board_html(rows: Sequence[MatrixRow], records: Path) -> str:
    """The board as a fragment of HTML, without blank lines."""
    sections = "\n".join(_section(row, records) for row in rows)
    return f'<style>\n{STYLE}\n</style>\n<div class="board">\n{sections}\n</div>'


def _section(row: MatrixRow, records: Path) -> str:
    pairs = [(cell, read_record(records, cell)) for cell in row.cells()]
    good = [record for _, record in pairs if record is not None and not record["exit_code"]]
    wrong = [line for cell, record in pairs for line in outside_band(cell, record)]
    seeds = f"{len(row.seeds)} seeds" if len(row.seeds) > 1 else "1 seed"
    parts = [f"<h3>{_text(row.title)}</h3>", f"<p>{_text(f'{row.backbone}, {seeds}, {row.named}')}</p>"]
    parts += [f'<p class="bad">{_text(line)}</p>' for line in wrong]
    if good:
        parts += [_picture(row.title, good), _table(good)]
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _text(text: str) -> str:
    return escape(printable(text))


# ---------------------------------------------------------------- the curve


Points = list[tuple[float, float]]


def _picture(title: str, records: Sequence[Record]) -> str:
    """Mean and range of the validations over the seeds, and the mean of training."""
    validation = _by_step(records, "validation")
    training = _by_step(records, "training")
    values = [value for column in validation.values() for value in column]
    values += [fmean(column) for column in training.values()]
    if not values:
        return "<p>no validation was recorded</p>"
    low, high = min(0.0, *values), max(values)
    high = high if high > low else low + 1.0
    last = max([*validation, *training]) or 1

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    lines = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(title)}: return over steps">']
    for value in (low, (low + high) / 2, high):
        _, y = place(0, value)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 4}" y="{y + 3.5:.1f}" text-anchor="end">{value:.3g}</text>')
    for step, anchor in ((0, "start"), (last, "end")):
        lines.append(f'<text x="{place(step, 0)[0]:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step:g}</text>')
    lines.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    if len(records) > 1 and len(validation) > 1:
        edge = [place(step, max(column)) for step, column in validation.items()]
        edge += [place(step, min(column)) for step, column in reversed(validation.items())]
        lines.append(f'<polygon class="seeds" points="{_points(edge)}"/>')
    if training:
        lines.append(
            f'<polyline class="training" points="{_points([place(s, fmean(c)) for s, c in training.items()])}"/>'
        )
    mean = [place(step, fmean(column)) for step, column in validation.items()]
    lines.append(f'<polyline class="mean" points="{_points(mean)}"/>')
    lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in mean]
    return "\n".join([*lines, "</svg>"])


def _by_step(records: Sequence[Record], which: str) -> dict[int, list[float]]:
    """The seeds' values at each step that has any."""
    found: dict[int, list[float]] = {}
    for record in records:
        for step, value in record["curve"][which]:
            found.setdefault(step, []).append(value)
    return dict(sorted(found.items()))


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


# ---------------------------------------------------------------- the figures


def _table(records: Sequence[Record]) -> str:
    """Mean, range, and how the mean differs from that of the records before."""
    before = [record["previous"] for record in records if record.get("previous")]
    dates = sorted({str(one["date"]) for one in before})
    several = len(records) > 1
    head = ["", *(["mean", "range"] if several else ["value"]), *([f"since {dates[-1]}"] if dates else [])]
    lines = [
        '<table class="figures"><thead><tr>',
        *(f"<th>{_text(cell)}</th>" for cell in head),
        "</tr></thead><tbody>",
    ]
    for shown in TABLE:
        values = _figures(records, shown.name)
        if not values:
            continue
        cells = [format(fmean(values), shown.form)]
        if several:
            cells.append(_range(values, shown.form, len(records)))
        if dates:
            earlier = _figures(before, shown.name)
            cells.append(_change(fmean(values) - fmean(earlier), shown.form) if earlier else "")
        row = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        lines.append(f"<tr><th>{_text(shown.label)}</th>{row}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _figures(records: Sequence[Record], name: str) -> list[float]:
    return [value for record in records if (value := record["figures"].get(name)) is not None]


def _range(values: Sequence[float], form: str, runs: int) -> str:
    """From the lowest to the highest; of how many runs, if some have no such figure."""
    some = f" ({len(values)} of {runs})" if len(values) < runs else ""
    if len(values) < 2:
        return some.strip()
    return f"{format(min(values), form)} … {format(max(values), form)}{some}"


def _change(difference: float, form: str) -> str:
    shown = format(difference, f"+{form}")
    return "0" if float(shown.replace(",", "")) == 0 else shown
