"""How runs differ task by task: the reward of each validation task in one validation and in another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.statistics import Gain
from ajet.observe.viewer.library import Experiment

SHOWN = 3
"""Tasks named on each side."""
NEWEST = """
    SELECT step, task_id, avg(reward) AS reward FROM episode WHERE id IN (
      SELECT max(id) FROM episode WHERE validation = 1 AND reward IS NOT NULL AND status != 'cancelled'
      GROUP BY step, task_id, repeat)
    GROUP BY step, task_id ORDER BY step
"""
"""The mean reward of each task in each validation. Of an attempt that was played again, the newest counts."""


class MovedTask(NamedTuple):
    """A task and its mean reward before and after."""

    task_id: str
    query: str
    before: float
    after: float


@dataclass(slots=True)
class RunGain:
    """A run's validation against another, or against an earlier one of its own."""

    name: str
    against: str
    gain: Gain | None = None
    """None: the two have no task in common."""
    worse: list[MovedTask] = field(default_factory=list)
    """The tasks that lost most, the worst first."""
    better: list[MovedTask] = field(default_factory=list)


def run_gains(experiments: Sequence[Experiment]) -> list[RunGain]:
    """The last validation of each run against that of the first; of a single run, its last against its
    first. A run without a validation has none."""
    validations = [validation_rewards(experiment) for experiment in experiments]
    if len(experiments) == 1:
        (found,), (one,) = validations, experiments
        steps = sorted(found)
        if len(steps) < 2:
            return []
        first, last = steps[0], steps[-1]
        return [_gain(one, f"step {last}", f"step {first}", found[first], found[last])]
    ends = [found[max(found)] if found else {} for found in validations]
    return [
        _gain(experiment, experiment.name, experiments[0].name, ends[0], rewards)
        for experiment, rewards in zip(experiments[1:], ends[1:], strict=True)
        if ends[0] and rewards
    ]


def validation_rewards(experiment: Experiment) -> dict[int, dict[str, float]]:
    """The mean reward of each task in each recorded validation, by step. There are none where the episodes that went
    well weren't kept, and in a search for prompts, whose rounds try several candidates on the same tasks."""
    store, found = experiment.store(), dict[int, dict[str, float]]()
    mixed = experiment.prompts.exists or experiment.keeps_a_selection()
    for step, task, reward in store.rows(NEWEST) if store is not None and not mixed else ():
        found.setdefault(step, {})[task] = reward
    return found


def _gain(
    experiment: Experiment, name: str, against: str, before: dict[str, float], after: dict[str, float]
) -> RunGain:
    shared = sorted(before.keys() & after.keys(), key=lambda task: (after[task] - before[task], task))
    worse = [task for task in shared[:SHOWN] if after[task] < before[task]]
    better = [task for task in shared[: -SHOWN - 1 : -1] if after[task] > before[task]]
    store = experiment.store()
    queries = _queries(store, [*worse, *better]) if store is not None else {}
    worst, best = (
        [MovedTask(task, queries.get(task, ""), before[task], after[task]) for task in tasks]
        for tasks in (worse, better)
    )
    return RunGain(name, against, Gain.of(before, after), worst, best)


def _queries(store: EpisodeStore, tasks: Sequence[str]) -> dict[str, str]:
    query = "SELECT task_id, query FROM task WHERE task_id IN (SELECT value FROM json_each(:tasks))"
    return dict(store.rows(query, {"tasks": json.dumps(list(tasks))}))
