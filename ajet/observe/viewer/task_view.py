"""A task in the form its pages need: question, first messages, gold answer, metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.viewer.library import Experiment

_ANSWER_NAMES = (
    "answer", "final_answer", "gold_answer", "gold", "ground_truth", "reference", "reference_answer", "solution",
    "target", "expected", "label",
)  # fmt: skip
"""Where data sets keep the right answer, the most usual first."""


def task_view(experiment: Experiment, store: EpisodeStore, task_id: str) -> dict[str, Any]:
    """What the reader gave of a task. `recorded` is false if the run was made before that was recorded."""
    task = store.task(task_id)
    if task is None:
        return {"task_id": task_id, "recorded": False}
    found = gold_answer(task.metadata, answer_names(experiment.config()))
    return {
        "task_id": task_id,
        "recorded": True,
        "query": task.main_query,
        "init_messages": task.init_messages,
        "env_type": task.env_type,
        "metadata": task.metadata,
        "answer": found,
    }


def gold_answer(metadata: dict[str, Any], names: Sequence[str]) -> Any:
    """The right answer, from the first of these fields that the task has; None if it has none of them."""
    return next((metadata[name] for name in names if metadata.get(name) is not None), None)


def answer_names(config: dict[str, Any]) -> tuple[str, ...]:
    """The fields to look into: what the run's judge compares with (`reference_field`), then the usual ones."""
    judge = (config.get("ajet") or {}).get("task_judge")
    sections = judge.values() if isinstance(judge, dict) else ()
    named = [section["reference_field"] for section in sections if _names_a_field(section)]
    return (*named, *_ANSWER_NAMES)


def _names_a_field(section: Any) -> bool:
    return isinstance(section, dict) and isinstance(section.get("reference_field"), str)
