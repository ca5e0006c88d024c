"""The overview of a run: whether it is learning, what is wrong with it, and where to look.

The verdict follows from recorded metrics by the few rules below. `HEALTH` lists the checks; each names what is wrong in
words. A new one is a function and an entry in that list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

import numpy as np

from ajet.observe.episode_codec import conversation, message_text
from ajet.observe.episode_store import EpisodeStore, Facets
from ajet.observe.task_statistics import TaskFilter, task_page
from ajet.observe.viewer.library import Experiment, Reading
from ajet.observe.viewer.series import Values

Level: TypeAlias = Literal["good", "quiet", "warn", "bad"]

_FEWEST_STEPS = 10
"""Fewer don't tell a trend."""
_LONGEST_WINDOW = 50
_PARTS = 10
"""Of more validations, several neighbours are taken together: the best of many is best by chance."""
_ERRORS = 2.0
"""A change is real if it is larger than so many standard errors."""
_MANY_FAIL, _MOST_FAIL, _FEW_MIXED, _MANY_CUT, _MANY_DROPPED = 0.1, 0.5, 0.2, 0.1, 0.1
_TASKS = 5
_EXCERPT = 600
_WARNINGS = 3
_VALIDATIONS = ("val/return/mean", "val/reward/mean", "val/success/rate")
_RETURNS = ("return/mean", "reward/mean", "success/rate")
_PHASES = ("rollout", "judge", "train", "sync", "validate", "checkpoint")
_NAMES = (
    *_VALIDATIONS, *_RETURNS, "val/return/std", "val/episode/usable", "val/episode/count", "episode/count",
    "episode/failed_share", "episode/sampled_tokens_total",
    "credit/groups", "credit/zero_variance_groups", "ledger/captured", "ledger/trained", "ledger/dropped",
    "outcome/length", "outcome/overflow", "time/step", *(f"time/{phase}" for phase in _PHASES), "user/cost",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HealthNote:
    """One line of the overview. `link`: the page below the run's that shows more."""

    level: Level
    text: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """Whether a run is learning, in a few words, and what says so."""

    level: Level
    title: str
    because: list[HealthNote] = field(default_factory=list)


class Series(NamedTuple):
    """The steps that have a metric, and its value in each."""

    steps: list[int]
    values: Values

    def part(self, start: int | None, end: int | None = None) -> Series:
        return Series(self.steps[start:end], self.values[start:end])

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def where(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if first == last else f"steps {first}–{last}"


class Figures:
    """The metrics that the rules read."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._steps = np.array(columns["steps"], np.int64)
        self._series: dict[str, list[float | None]] = columns["series"]
        self.any = len(self._steps) > 0
        self.window = max(1, min(_LONGEST_WINDOW, len(self.of("episode/count").steps) // 5))
        """How many steps the beginning and the end of a run are."""

    def of(self, *names: str) -> Series:
        """The first of these metrics that has any value."""
        for name in names:
            values = np.array(self._series.get(name, []), np.float64)
            there = ~np.isnan(values)
            if there.any():
                return Series(self._steps[there].tolist(), values[there])
        return Series([], np.array([]))

    def total(self, name: str) -> float | None:
        """The sum over all steps; None if none has a value."""
        found = self.of(name)
        return float(found.values.sum()) if found.steps else None

    def lately(self, name: str) -> Series:
        """The last steps, as many as `window` says."""
        return self.of(name).part(-self.window)


def overview(experiment: Experiment) -> dict[str, Any]:
    """All that the page shows. What can't be read is left out, and named among the findings."""
    reading = Reading()
    no_steps: dict[str, Any] = {"steps": [], "series": {}, "problem": ""}
    columns = reading.part(lambda: experiment.metrics(_NAMES), no_steps)
    figures = Figures(columns)
    nothing: dict[str, Any] = {}
    none: list[HealthNote] = []
    health = [finding for check in HEALTH for finding in reading.part(partial(check, experiment, figures), none)]
    tasks = reading.part(lambda: _tasks(experiment), nothing)
    judged = verdict(figures)
    if experiment.prompts.exists:
        found = HealthNote("quiet", "The run searches for prompt templates. Its candidates have a page.", "candidates")
        judged = replace(judged, because=[found, *judged.because])
    problems = [*filter(None, [columns["problem"]]), *reading.problems]
    return {
        "verdict": judged,
        "health": [*(HealthNote("bad", problem) for problem in problems), *health],
        "totals": _totals(figures),
        "phases": {phase: total for phase in _PHASES if (total := figures.total(f"time/{phase}"))},
        **tasks,
    }


# ---------------------------------------------------------------- is it learning?


def verdict(figures: Figures) -> RunVerdict:
    """Judge by validation where there are two of them or more, else by the training reward."""
    if not figures.any:
        return RunVerdict(
            "quiet", "No step has finished yet", [HealthNote("quiet", "The charts begin with the first step.")]
        )
    validation, training = figures.of(*_VALIDATIONS), figures.of(*_RETURNS)
    because = [*_of_validation(validation), *_of_training(training, figures), *_of_groups(figures)]
    trained = _trend(training, figures.window)
    failed = figures.lately("episode/failed_share")
    if failed.steps and failed.mean >= _MOST_FAIL:
        return RunVerdict("bad", "Most episodes fail", because)
    if len(validation.steps) >= 2:
        return RunVerdict(*_by_validation(validation, trained, figures), because)
    titles: dict[int | None, tuple[Level, str]] = {
        None: ("quiet", "Too early to tell"), 1: ("good", "The training reward rises"),
        0: ("warn", "No clear change so far"), -1: ("bad", "The training reward falls"),
    }  # fmt: skip
    return RunVerdict(*titles[trained], because)


def _by_validation(series: Series, trained: int | None, figures: Figures) -> tuple[Level, str]:
    """Compare the first tenth of the validations, the best and the last; each is one validation if there are few."""
    count = len(series.steps)
    size = max(1, count // _PARTS)
    parts = [series.part(start, start + size) for start in range(count % size, count, size)]
    best = max(parts, key=lambda part: part.mean)
    certain = _ERRORS * math.sqrt(2 * _chance(series, figures) / size)
    risen, since_best = parts[-1].mean - parts[0].mean, best.mean - parts[-1].mean
    if risen > certain:
        if since_best > certain:
            return "warn", f"It learned, but has got worse since step {best.steps[-1]}"
        return "good", "It is learning"
    if risen < -certain:
        return "bad", "It is getting worse"
    if since_best > certain:
        return "warn", f"What it had learned by step {best.steps[-1]} is lost"
    if trained == 1:
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


def _trend(series: Series, window: int) -> int | None:
    """1: the last steps are better than the first, -1: worse, 0: as good; None: too few to tell."""
    if len(series.steps) < _FEWEST_STEPS:
        return None
    change = series.part(-window).mean - series.part(0, window).mean
    certain = _ERRORS * math.sqrt(2 * _noise(series) / window)
    return 0 if abs(change) <= certain else 1 if change > 0 else -1


def _of_validation(series: Series) -> list[HealthNote]:
    if not series.steps:
        return [HealthNote("quiet", "No validation so far.")]
    (first, last), (start, end) = (series.steps[0], series.steps[-1]), (series.values[0], series.values[-1])
    if first == last:
        return [HealthNote("quiet", f"Validation {_number(start)} at step {first}, the only one so far.")]
    best = int(series.values.argmax())
    highest = series.values[best]
    where = "its best" if highest == end else f"best {_number(highest)} at step {series.steps[best]}"
    return [
        HealthNote("quiet", f"Validation {_number(start)} at step {first}, {_number(end)} at step {last} ({where}).")
    ]


def _of_training(series: Series, figures: Figures) -> list[HealthNote]:
    if not series.steps:
        return []
    first, last = series.part(0, figures.window), series.part(-figures.window)
    text = f"Training reward {_number(first.mean)} in {first.where}"
    more = f", {_number(last.mean)} in {last.where}" if last.steps != first.steps else ""
    return [HealthNote("quiet", f"{text}{more}.")]


def _of_groups(figures: Figures) -> list[HealthNote]:
    groups, alike = figures.lately("credit/groups"), figures.lately("credit/zero_variance_groups")
    if not groups.steps or not alike.steps or not groups.mean:
        return []
    mixed = 1.0 - alike.mean / groups.mean
    text = f"{_percent(mixed)} of the groups in {groups.where} have different rewards. Only these teach."
    return [HealthNote("warn" if mixed < _FEW_MIXED else "quiet", text, "episodes")]


# ---------------------------------------------------------------- what is wrong?

Check: TypeAlias = Callable[[Experiment, Figures], list[HealthNote]]


def _failures(experiment: Experiment, figures: Figures) -> list[HealthNote]:
    """How many episodes failed lately, and of what, over the whole run."""
    lately = figures.lately("episode/failed_share")
    found = []
    if lately.values.any():
        level: Level = "bad" if lately.mean >= _MOST_FAIL else "warn" if lately.mean >= _MANY_FAIL else "quiet"
        text = f"{_percent(lately.mean)} of the episodes in {lately.where} failed, and count in no mean."
        found.append(HealthNote(level, text))
    facets = _facets(experiment)
    for kind, count in list(facets.failures.items())[:_WARNINGS]:
        text = f"{count:,} of the recorded episodes failed with {kind}."
        found.append(HealthNote("warn", text, f"episodes?failure={quote(kind, safe='')}"))
    return found


def _cut(experiment: Experiment, figures: Figures) -> list[HealthNote]:
    """Episodes whose reply was cut, or whose prompt left no room for one."""
    episodes = figures.total("episode/count")
    found = []
    for name, what in (("length", "a reply cut at its maximum length"), ("overflow", "no room left in the context")):
        count = figures.total(f"outcome/{name}")
        if count and episodes:
            level: Level = "warn" if count / episodes >= _MANY_CUT else "quiet"
            text = f"{count:,.0f} of {episodes:,.0f} episodes ended with {what}."
            found.append(HealthNote(level, text, "episodes?status=truncated"))
    return found


def _dropped(experiment: Experiment, figures: Figures) -> list[HealthNote]:
    """Sampled tokens that reach no sample."""
    captured, dropped = figures.total("ledger/captured"), figures.total("ledger/dropped")
    if not captured or not dropped:
        return []
    share = dropped / captured
    text = f"{_percent(share)} of the sampled tokens were dropped, and trained nothing."
    return [HealthNote("warn" if share >= _MANY_DROPPED else "quiet", text, "charts?find=dropped")]


def _logged(experiment: Experiment, figures: Figures) -> list[HealthNote]:
    """The newest warnings and errors of the log."""
    levels: dict[str, Level] = {"warning": "warn", "error": "bad", "critical": "bad"}
    found: dict[str, HealthNote] = {}
    for line in reversed(experiment.log_tail()):
        level = levels.get(str(line.get("level", "")).lower())
        if level is not None:
            text = str(line.get("message", ""))
            found.setdefault(text, HealthNote(level, text[:_EXCERPT], "about"))
    return list(found.values())[:_WARNINGS]


HEALTH: tuple[Check, ...] = (_failures, _cut, _dropped, _logged)


# ---------------------------------------------------------------- tasks


def _tasks(experiment: Experiment) -> dict[str, Any]:
    """The tasks that improved most, those that were never solved, and one task's first and last episode."""
    store = experiment.store()
    if store is None:
        return {}
    page = partial(task_page, store, threshold=experiment.success_threshold(), limit=_TASKS)
    improved = [row for row in page(TaskFilter(), sort="change", descending=True)[0] if (row.change or 0.0) > 0]
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
    sampled = figures.total("episode/sampled_tokens_total")
    cost, count = figures.of("user/cost"), figures.of("episode/count")
    lately = figures.lately("time/step")
    found = {
        "training_episodes": played,
        "validation_episodes": validated,
        "sampled_tokens": sampled if sampled is not None else figures.total("ledger/captured"),
        "trained_tokens": figures.total("ledger/trained"),
        "seconds": figures.total("time/step"),
        "seconds_per_step": lately.mean if lately.steps else None,
        "cost": float((cost.values * count.values).sum()) if cost.steps and cost.steps == count.steps else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _facets(experiment: Experiment) -> Facets:
    store = experiment.store()
    return store.facets() if store is not None else Facets()


def _number(value: float) -> str:
    return f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
