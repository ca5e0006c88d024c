"""The records of `ajet bench`: one JSON file for each cell, with what its run came to.

A record holds no path of the machine it was made on, and its `previous` is what the record before it said.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ajet.observe.board_matrix import MatrixCell
from ajet.observe.experiment import PACKAGES, read_environment
from ajet.observe.metrics import read_metrics
from ajet.schema import __version__
from ajet.schema.errors import ConfigError
from ajet.schema.printable import printable

VALIDATION, TRAINING = "val/return/mean", "return/mean"
GAPS = ("loss/sampler_gap_max", "train/sampler_gap")
"""The largest difference of a log-probability between engine and trainer, as the backbones call it."""
LEARNT_SHARE = 0.8
"""Of the whole gain: when a run has reached it, it has learnt."""


class RunEnd(NamedTuple):
    """How a run's process ended."""

    exit_code: int
    seconds: float
    cpu_seconds: float
    memory_mib: float
    error: str = ""


def record_file(folder: Path, cell: MatrixCell) -> Path:
    return folder / f"{cell.name}.json"


def read_record(folder: Path, cell: MatrixCell) -> dict[str, Any] | None:
    """The cell's record, if there is one. Raises ConfigError for a file that is none."""
    file = record_file(folder, cell)
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
    """Write it as a whole: a full disk leaves the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{record['cell']}.json"
    part = file.with_suffix(".part")
    try:
        part.write_text(_compact(record) + "\n", encoding="utf-8")
        part.replace(file)
    except OSError as error:
        error.filename = error.filename or file  # a full disk names none
        raise
    finally:
        part.unlink(missing_ok=True)


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
