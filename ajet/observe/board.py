"""The board of `ajet bench`: a record for each cell of the matrix, and the page that shows them.

A record is a JSON file with what the cell's run came to. It holds no path of the machine it was made on, and its
`previous` is what the record before it said. The page has, for each row of the matrix, its curve over the seeds, its
figures, and what changed: `board_html` is a fragment that takes text colour and font from the page around it;
`write_page` makes a page of it. It has no scripts and loads nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ajet.observe.board_matrix import MatrixCell, MatrixRow
from ajet.observe.experiment import PACKAGES, read_environment
from ajet.observe.metrics import read_metrics
from ajet.schema import __version__
from ajet.schema.errors import ConfigError
from ajet.schema.files import write_whole
from ajet.schema.printable import printable

VALIDATION, TRAINING = "val/return/mean", "return/mean"
GAPS = ("loss/sampler_gap_max", "train/sampler_gap")
"""The largest difference of a log-probability between engine and trainer, as the backbones call it."""
LEARNT_SHARE = 0.8
"""A run has learnt when it has reached this share of its whole gain."""


class RunEnd(NamedTuple):
    """How a run's process ended."""

    exit_code: int
    seconds: float
    cpu_seconds: float
    memory_mib: float
    error: str = ""


def read_record(folder: Path, cell: MatrixCell) -> dict[str, Any] | None:
    """The cell's record, if there is one. Raises ConfigError for a file that is none."""
    file = folder / f"{cell.name}.json"
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error})\n    remove it: the cell will run again") from None
    if not isinstance(found, dict) or not {"cell", "fingerprint", "exit_code", "figures", "curve"} <= found.keys():
        raise ConfigError(f"{file} is not the record of a cell\n    remove it: the cell will run again")
    return found


def is_done(record: Mapping[str, Any] | None, cell: MatrixCell) -> bool:
    """Whether the cell ended well as it is written now."""
    return record is not None and record["exit_code"] == 0 and record["fingerprint"] == cell.fingerprint()


def state_of(record: Mapping[str, Any] | None, cell: MatrixCell) -> str:
    """Whether the cell will run, in a word or two."""
    if record is None:
        return "to run"
    if record["exit_code"]:
        return "failed: to run again"
    return "done" if is_done(record, cell) else "changed: to run again"


def make_record(cell: MatrixCell, experiment: Path, ended: RunEnd, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the cell came to; a failed one too."""
    steps = read_metrics(experiment / "metrics.jsonl")
    environment = read_environment(experiment)
    row = cell.row
    curve = {"validation": _curve(steps, VALIDATION), "training": _curve(steps, TRAINING)}
    record: dict[str, Any] = {
        "cell": cell.name,
        "row": row.name,
        "title": row.title,
        "seed": cell.seed,
        "conf": row.named,
        "backbone": row.backbone,
        "overrides": row.overrides,
        "fingerprint": cell.fingerprint(),
        "date": datetime.now(UTC).date().isoformat(),
        "ajet": __version__,
        "versions": {
            "python": environment.get("Python", "").partition(",")[0],
            **{name: environment[name] for name in PACKAGES if name in environment and name != "agentjet"},
        },
        "commit": environment.get("commit of ajet"),
        "machine": environment.get("machine"),
        "exit_code": ended.exit_code,
        "error": ended.error.replace(f"{Path.cwd()}{os.sep}", "").replace(f"{experiment.parent}{os.sep}", ""),
        "figures": _figures(steps, curve["validation"], ended),
        "last": {name: value for name, value in _last_values(steps).items() if name in row.band},
        "curve": curve,
    }
    if row.cold_start is not None:
        start = row.cold_start
        record["cold_start"] = {"conf": start.named, "overrides": start.overrides}
    if before is not None:
        kept = before if before["exit_code"] == 0 else before.get("previous")
        if kept:
            record["previous"] = {name: kept.get(name) for name in ("date", "ajet", "commit", "figures")}
    return record


def _curve(steps: Sequence[Mapping[str, Any]], metric: str) -> list[list[float]]:
    values = ((step["step"], step.get(metric)) for step in steps)
    return [
        [step, _rounded(value)] for step, value in values if isinstance(value, int | float) and math.isfinite(value)
    ]


def _figures(steps: Sequence[Mapping[str, Any]], validation: list[list[float]], ended: RunEnd) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if validation:
        first, last = validation[0][1], validation[-1][1]
        figures |= {"start": first, "end": last, "gain": _rounded(last - first)}
        best = max(value for _, value in validation)
        reached = first + LEARNT_SHARE * (best - first)
        figures["steps_to_80"] = next(s for s, value in validation if value >= reached) if best > first else None
    if steps:
        figures["steps"] = steps[-1]["step"]
        sampled = ("episode/sampled_tokens_total", "val/episode/sampled_tokens_total")
        figures["tokens"] = round(sum(value for name in sampled for value in _values(steps, name)))
    figures |= {
        "seconds": round(ended.seconds, 1),
        "cpu_seconds": round(ended.cpu_seconds, 1),
        "memory_mib": round(ended.memory_mib),
    }
    if gaps := [gap for name in GAPS for gap in _values(steps, name)]:
        figures["sampler_gap"] = _rounded(max(gaps))
    if divergences := _values(steps, "loss/sampler_kl"):
        figures["sampler_kl"] = _rounded(max(divergences, key=abs))
    return figures


def _values(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = (step.get(name) for step in steps)
    return [value for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _last_values(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The newest value of each metric."""
    last: dict[str, float] = {}
    for step in steps:
        last |= {name: _rounded(v) for name, v in step.items() if isinstance(v, int | float) and math.isfinite(v)}
    return last


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    write_whole(folder / f"{record['cell']}.json", _compact(record) + "\n")


def _compact(record: Mapping[str, Any]) -> str:
    """JSON with one line for each key: curves aren't spread over hundreds."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in record.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def outside_band(cell: MatrixCell, record: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with the cell's result, a line each; nothing if all is as the row expects."""
    if record is None:
        return [f"{cell.name}: has no record"]
    if record["exit_code"]:
        return [printable(f"{cell.name}: failed ({record['exit_code']}): {record['error']}")]
    wrong = []
    for name, (low, high) in cell.row.band.items():
        value = record["figures"].get(name, record["last"].get(name))
        limits = f"{'…' if low is None else f'{low:g}'} to {'…' if high is None else f'{high:g}'}"
        if value is None:
            wrong.append(f"{cell.name}: {name} was not recorded (--again records it), and its band is {limits}")
        elif (low is not None and value < low) or (high is not None and value > high):
            wrong.append(f"{cell.name}: {name} is {value:g}, and its band is {limits}")
    return wrong


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
.board h3{margin:0;font-size:16px;overflow-wrap:anywhere}
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
.board .figures thead th{opacity:.75}"""
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
        values = _figures_of_seeds(records, shown.name)
        if not values:
            continue
        cells = [format(fmean(values), shown.form)]
        if several:
            cells.append(_range(values, shown.form, len(records)))
        if dates:
            earlier = _figures_of_seeds(before, shown.name)
            cells.append(_change(fmean(values) - fmean(earlier), shown.form) if earlier else "")
        row = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        lines.append(f"<tr><th>{_text(shown.label)}</th>{row}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _figures_of_seeds(records: Sequence[Record], name: str) -> list[float]:
    return [value for record in records if (value := record["figures"].get(name)) is not None]


def _range(values: Sequence[float], form: str, runs: int) -> str:
    """Say the lowest and the highest; and how many runs have this figure, if some don't."""
    some = f" ({len(values)} of {runs})" if len(values) < runs else ""
    if len(values) < 2:
        return some.strip()
    return f"{format(min(values), form)} … {format(max(values), form)}{some}"


def _change(difference: float, form: str) -> str:
    shown = format(difference, f"+{form}")
    return "0" if float(shown.replace(",", "")) == 0 else shown
