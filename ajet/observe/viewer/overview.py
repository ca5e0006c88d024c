"""The overview of a run: whether it is learning, what is wrong with it, and where to look.

The verdict follows from recorded metrics by the few rules below. What is wrong comes from `ajet.observe.diagnosis`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ajet.observe.diagnosis import RULES, in_order
from ajet.observe.episode_codec import conversation, message_text
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.progress_state import RunningTotal
from ajet.observe.run_evidence import ERRORS, Figures, Level, RunFinding, Series, Trend, as_number, as_percent
from ajet.observe.statistics import TaskFilter, task_page
from ajet.observe.viewer.library import Experiment, Reading

_FEWEST_STEPS = 10
"""Fewer don't tell a trend."""
_PARTS = 10
"""Neighbours of more validations are taken together: the best of many is best by chance."""
_MOST_FAIL = 0.5
_TASKS = 5
_EXCERPT = 600
_PHASES = ("rollout", "train", "sync", "validate", "checkpoint")


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """Whether a run is learning, in a few words, and what says so."""

    level: Level
    title: str
    because: list[RunFinding] = field(default_factory=list)


def overview(experiment: Experiment) -> dict[str, Any]:
    """All that the page shows. What can't be read is left out, and named among the findings."""
    reading = Reading()
    columns = experiment.metrics_in(reading)
    figures = Figures(columns)
    run = experiment.evidence(figures, reading)
    health = in_order([finding for rule in RULES for finding in reading.part(partial(rule, run), list[RunFinding]())])
    tasks = reading.part(lambda: _tasks(experiment), dict[str, Any]())
    judged = verdict(figures)
    if experiment.prompts.exists:
        found = _remark("The run searches for prompt templates. Its candidates have a page.", link="candidates")
        judged = replace(judged, because=[found, *judged.because])
    problems = dict.fromkeys(reading.problems)
    return {
        "verdict": judged,
        "health": [*(RunFinding("bad", "", problem) for problem in problems), *map(_as_shown, health)],
        "totals": {**_totals(figures), **RunningTotal.of_columns(columns).figures()},
        "phases": {phase: total for phase in _PHASES if (total := figures.total(f"time/{phase}"))},
        **tasks,
    }


def _as_shown(finding: RunFinding) -> RunFinding:
    change = finding.change if finding.level in ("warn", "bad") else ""
    return replace(finding, text=finding.said, change=change)


def _remark(text: str, link: str = "") -> RunFinding:
    return RunFinding("quiet", "", text, link=link)


# ---------------------------------------------------------------- is it learning?


def verdict(figures: Figures) -> RunVerdict:
    """Judge by validation where there are two of them or more, else by the training reward."""
    if not figures.any:
        return RunVerdict("quiet", "No step has finished yet", [_remark("The charts begin with the first step.")])
    validation, training = figures.of("val/return/mean"), figures.of("return/mean")
    because = [*_of_validation(validation), *_of_training(training, figures), *_of_groups(figures)]
    trained = figures.change("return/mean") if len(training.steps) >= _FEWEST_STEPS else None
    failed = figures.lately("episode/failed_share")
    if failed.steps and failed.mean >= _MOST_FAIL:
        return RunVerdict("bad", "Most episodes fail", because)
    if len(validation.steps) >= 2:
        return RunVerdict(*_by_validation(validation, trained, figures), because)
    if trained is None:
        return RunVerdict("quiet", "Too early to tell", because)
    if trained.risen:
        return RunVerdict("good", "The training reward rises", because)
    if trained.fallen:
        return RunVerdict("bad", "The training reward falls", because)
    return RunVerdict("warn", "No clear change so far", because)


def _by_validation(series: Series, trained: Trend | None, figures: Figures) -> tuple[Level, str]:
    """Compare the first tenth of the validations, the best and the last; each is one validation if there are few."""
    count = len(series.steps)
    size = max(1, count // _PARTS)
    parts = [series.part(start, start + size) for start in range(count % size, count, size)]
    best = max(parts, key=lambda part: part.mean)
    certain = ERRORS * math.sqrt(2 * _chance(series, figures) / size)
    risen, since_best = parts[-1].mean - parts[0].mean, best.mean - parts[-1].mean
    if risen > certain:
        if since_best > certain:
            return "warn", f"It learned, but has got worse since step {best.steps[-1]}"
        return "good", "It is learning"
    if risen < -certain:
        return "bad", "It is getting worse"
    if since_best > certain:
        return "warn", f"What it had learned by step {best.steps[-1]} is lost"
    if trained is not None and trained.risen:
        return "warn", "The training reward rises, validation doesn't"
    return "quiet", "No clear change so far"


def _chance(series: Series, figures: Figures) -> float:
    """The variance of one validation by chance alone: by the spread of its episodes if that is recorded."""
    spread, count = figures.of("val/return/std"), figures.of("val/episode/usable")
    if spread.steps and spread.steps == count.steps and count.values.all():
        return float((spread.values**2 / count.values).mean())
    return _noise(series)


def _noise(series: Series) -> float:
    """The variance by chance, from the differences of neighbours: from one to the next, learning changes little."""
    if len(series.steps) < _FEWEST_STEPS:
        return 0.0
    return float((np.diff(series.values) ** 2).mean() / 2)


def _of_validation(series: Series) -> list[RunFinding]:
    if not series.steps:
        return [_remark("No validation so far.")]
    (first, last), (start, end) = (series.steps[0], series.steps[-1]), (series.values[0], series.values[-1])
    if first == last:
        return [_remark(f"Validation {as_number(start)} at step {first}, the only one so far.")]
    best = int(series.values.argmax())
    highest = series.values[best]
    where = "its best" if highest == end else f"best {as_number(highest)} at step {series.steps[best]}"
    return [_remark(f"Validation {as_number(start)} at step {first}, {as_number(end)} at step {last} ({where}).")]


def _of_training(series: Series, figures: Figures) -> list[RunFinding]:
    if not series.steps:
        return []
    first, last = series.part(0, figures.window), series.part(-figures.window)
    text = f"Training reward {as_number(first.mean)} in {first.where}"
    more = f", {as_number(last.mean)} in {last.where}" if last.steps != first.steps else ""
    return [_remark(f"{text}{more}.")]


def _of_groups(figures: Figures) -> list[RunFinding]:
    groups, alike = figures.lately("credit/groups"), figures.lately("credit/zero_variance_groups")
    if not groups.steps or not alike.steps or not groups.mean:
        return []
    mixed = 1.0 - alike.mean / groups.mean
    text = f"{as_percent(mixed)} of the groups in {groups.where} have different rewards. Only these teach."
    return [_remark(text, link="episodes")]


# ---------------------------------------------------------------- tasks


def _tasks(experiment: Experiment) -> dict[str, Any]:
    """The tasks that improved most, those that were never solved, and one task's first and last episode."""
    if (store := experiment.store()) is None:
        return {}
    page = partial(task_page, store, limit=_TASKS)
    improved = [row for row in page(TaskFilter(), sort="change", descending=True)[0] if (row.change or 0.0) > 0]
    if not page(TaskFilter(solved_min=0.0))[1]:  # no attempt has a reward: there is nothing to say of any task
        return {}
    unsolved, count = page(TaskFilter(solved_max=0.0), sort="attempts", descending=True)
    told = improved or page(TaskFilter(), sort="attempts", descending=True)[0]
    return {
        "improved": [
            {"task_id": row.task_id, "preview": row.preview, "latest": row.latest, "change": row.change}
            for row in improved
        ],
        "unsolved": [{"task_id": row.task_id, "preview": row.preview, "attempts": row.attempts} for row in unsolved],
        "unsolved_count": count,
        "pair": next((pair for row in told if (pair := _first_and_last(store, row.task_id))), None),
    }


def _first_and_last(store: EpisodeStore, task: str) -> dict[str, Any] | None:
    """The first and the last episode of a task that have a reward, both of training or both of validation."""
    query = (
        "SELECT episode_id, step, reward FROM episode WHERE task_id = :task AND validation = :validation "
        "AND reward IS NOT NULL ORDER BY step {order}, id {order} LIMIT 1"
    )
    for validation in (1, 0):
        values = {"task": task, "validation": validation}
        found = [row for order in ("ASC", "DESC") for row in store.rows(query.format(order=order), values)]
        if found and found[0]["step"] != found[1]["step"]:
            break
    else:
        return None
    ends = [{**dict(row), "said": _last_words(store, row["episode_id"])} for row in found]
    return {"task_id": task, "query": store.get(found[0]["episode_id"]).query or task, "episodes": ends}


def _last_words(store: EpisodeStore, episode_id: str) -> str:
    """What the model said last: text, or the call of a tool."""
    tree = store.get(episode_id).episode.tree
    messages = conversation(tree, len(tree.calls) - 1) if tree.calls else []
    said = [message_text(message).strip() for message in messages if message.get("role") == "assistant"]
    text = next((one for one in reversed(said) if one), "")
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


# ---------------------------------------------------------------- sums


def _totals(figures: Figures) -> dict[str, float]:
    """What the run took, as far as it is recorded."""
    played, validated = figures.total("episode/count"), figures.total("val/episode/count")
    cost, count = figures.of("user/cost"), figures.of("episode/count")
    lately = figures.lately("time/step")
    trained = figures.total("tokens/trained")  # the ledger also counts groups whose rewards are equal
    found = {
        "training_episodes": played,
        "validation_episodes": validated,
        "trained_tokens": trained if trained is not None else figures.total("ledger/trained"),
        "seconds_per_step": lately.mean if lately.steps else None,
        "cost": float((cost.values * count.values).sum()) if cost.steps and cost.steps == count.steps else None,
    }
    return {name: value for name, value in found.items() if value is not None}
