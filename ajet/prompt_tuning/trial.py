"""`Trial`: a candidate tried on one task. `Score`: its trials on several tasks.

A trial that failed because of the engine or the infrastructure says nothing about the candidate: it has no value, and
its task is left out when candidates are compared. Any other trial without a reward counts as 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from ajet.schema.chat import Message

T = TypeVar("T")


async def concurrently(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all, and return the results in order. The first error cancels the rest, and is raised without an exception
    group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


class Purpose(StrEnum):
    """The purpose of episodes."""

    SEARCH = "search"
    """Their transcripts and feedback are read, to write proposals."""
    BATCH = "batch"
    """A few validation tasks, on which several candidates are compared."""
    VALIDATION = "validation"
    """All validation tasks: decides which candidate is the best."""
    CONFIRMATION = "confirmation"
    """Tasks that no candidate has seen, once the search is over."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate tried on one task, once or several times."""

    task_id: str
    reward: float | None = None
    """The mean of its episodes' rewards; None if none has one."""
    success: float | None = None
    """The share of its episodes that succeeded."""
    failure: str = ""
    """Why an episode failed, in one line."""
    fault: bool = False
    """All of its episodes failed, and neither the candidate nor the model is the cause."""
    feedback: str = ""
    """Messages of the judge, the workflow and failures."""
    query: str = ""
    """The task's main query."""
    conversations: tuple[list[Message], ...] = ()
    """The messages of the model calls, one list for each conversation: of a `search` trial, which is read."""
    episodes: tuple[str, ...] = ()
    """Episode ids."""
    tokens: tuple[int, int] = (0, 0)
    """Prompt and sampled tokens of all its model calls."""
    prompts_used: frozenset[str] | None = None
    """The templates that its workflow asked for; None if that isn't known."""

    @property
    def value(self) -> float | None:
        """The value in a mean; None if the trial doesn't count."""
        if self.fault:
            return None
        return 0.0 if self.reward is None else self.reward

    def to_record(self) -> dict[str, Any]:
        """The record for the history, without transcripts, which are in the episodes."""
        record: dict[str, Any] = {"task": self.task_id, "reward": self.reward, "success": self.success}
        if self.failure:
            record["failure"] = self.failure
        if self.fault:
            record["fault"] = True
        return {**record, "episodes": list(self.episodes)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Trial:
        """Read a trial from the history."""
        return cls(
            task_id=str(record["task"]),
            reward=record["reward"],
            success=record["success"],
            failure=str(record.get("failure", "")),
            fault=bool(record.get("fault", False)),
            episodes=tuple(record["episodes"]),
        )


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate's trials, in the order of the tasks."""

    candidate: str
    """Its id."""
    purpose: Purpose
    trials: tuple[Trial, ...] = field(default_factory=tuple)

    @property
    def values(self) -> dict[str, float]:
        """By task, without those that don't count."""
        return {trial.task_id: trial.value for trial in self.trials if trial.value is not None}

    @property
    def mean(self) -> float | None:
        """Over the trials that count; None if there is none."""
        return _mean(self.values.values())

    @property
    def success(self) -> float | None:
        """The share of its trials' episodes that succeeded."""
        return _mean(0.0 if trial.success is None else trial.success for trial in self.trials if not trial.fault)


def common_means(scores: Sequence[Score]) -> list[float | None]:
    """Each score's mean over the tasks that count in all of them. A candidate of which no trial counts gets None, and
    doesn't narrow the tasks of the others."""
    counted = [score.values for score in scores]
    tasks = set.intersection(*(set(values) for values in counted if values)) if any(counted) else set()
    return [_mean(values[task] for task in sorted(tasks)) if values and tasks else None for values in counted]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
