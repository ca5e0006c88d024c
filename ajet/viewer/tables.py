"""Tables to download: metrics and lists of episodes as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

EPISODE_COLUMNS = (
    "episode_id", "step", "validation", "task_id", "group_id", "repeat", "tag", "status", "failure", "reward",
    "advantage", "turns", "calls", "tokens", "sampled", "trained", "forks", "seconds",
)  # fmt: skip
TASK_COLUMNS = (
    "task_id",
    "tag",
    "attempts",
    "failed",
    "solved",
    "latest",
    "change",
    "reward",
    "last_step",
    "answer",
    "preview",
    "by_step",
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet would run a text that begins with one of these."""


def metrics_csv(columns: dict[str, Any]) -> str:
    """One row per step, one column per metric."""
    series = columns["series"]
    rows = [[step, *(values[index] for values in series.values())] for index, step in enumerate(columns["steps"])]
    return _csv(["step", *series], rows)


def episodes_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One row per episode."""
    return _csv(EPISODE_COLUMNS, [[row.get(name) for name in EPISODE_COLUMNS] for row in rows])


def tasks_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One row per task; `by_step` lists the share solved as `step:share`."""
    shown = [{**row, "by_step": " ".join(f"{step}:{share:.4g}" for step, share in row["by_step"])} for row in rows]
    return _csv(TASK_COLUMNS, [[row.get(name) for name in TASK_COLUMNS] for row in shown])


def _csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([_safe(name) for name in head])
    writer.writerows([_safe(value) for value in row] for row in rows)
    return text.getvalue()


def _safe(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
