"""The page of tasks counted from the episodes themselves, to compare with what is kept beside them."""

from __future__ import annotations

from typing import Any

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.statistics import TaskFilter, TaskRow


def counted_tasks(store: EpisodeStore, where: TaskFilter | None = None, threshold: float = 1.0) -> list[TaskRow]:
    """All tasks of the filter, by id."""
    where = where or TaskFilter()
    scope = "" if where.validation is None else f"AND validation = {int(where.validation)}"
    attempts: dict[str, list[dict[str, Any]]] = {}
    for row in store.rows(f"SELECT * FROM episode WHERE status != 'cancelled' {scope} ORDER BY task_id, step, id"):
        attempts.setdefault(row["task_id"], []).append(dict(row))
    return [row for row in (_counted(name, of, threshold) for name, of in attempts.items()) if _wanted(row, where)]


def _counted(task_id: str, attempts: list[dict[str, Any]], threshold: float) -> TaskRow:
    usable = [row for row in attempts if row["reward"] is not None]
    steps = sorted({row["step"] for row in attempts})
    share = {step: _solved([row for row in usable if row["step"] == step], threshold) for step in steps}
    first, latest = share[steps[0]], share[steps[-1]]
    return TaskRow(
        task_id=task_id,
        attempts=len(attempts),
        failed=len(attempts) - len(usable),
        solved=_solved(usable, threshold),
        latest=latest,
        change=None if first is None or latest is None else latest - first,
        reward=sum(row["reward"] for row in usable) / len(usable) if usable else None,
        last_step=steps[-1],
        tag=max(row["tag"] for row in attempts),
        preview=max(row["preview"] for row in attempts),
        by_step=[(step, solved) for step, solved in share.items() if solved is not None],
    )


def _solved(usable: list[dict[str, Any]], threshold: float) -> float | None:
    said = [row["reward"] >= threshold if row["success"] is None else bool(row["success"]) for row in usable]
    return sum(said) / len(said) if said else None


def _wanted(row: TaskRow, where: TaskFilter) -> bool:
    text = where.text.lower()
    return (
        (text in row.task_id.lower() or text in row.preview.lower())
        and where.tag in ("", row.tag)
        and (where.solved_min is None or (row.solved is not None and row.solved >= where.solved_min))
        and (where.solved_max is None or (row.solved is not None and row.solved <= where.solved_max))
    )
