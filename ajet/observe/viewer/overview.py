"""The overview of a run: whether it is learning, what is wrong with it, and where to look.

The verdict follows from recorded metrics by the few rules below. `HEALTH` lists the checks; each names what is wrong in
words. A new one is a function and an entry in that list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from ajet.observe.episode_codec import conversation, message_text
from ajet.observe.episode_store import EpisodeStore, Facets
from ajet.observe.task_statistics import TaskFilter, task_page
from ajet.observe.viewer.library import Experiment, Reading

Level: TypeAlias = Literal["good", "quiet", "warn", "bad"]
Point: TypeAlias = tuple[int, float]
"""A step, and the value of a metric in it."""

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
class Finding:
    """One line of the overview. `link`: the page below the run's that shows more."""

    level: Level
    text: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run is learning, in a few words, and what says so."""

    level: Level
    title: str
    because: list[Finding] = field(default_factory=list)


class Figures:
    """The metrics that the rules read. Values of a metric are those of the steps that have one."""

    def __init__(self, columns: dict[str, Any]) -> None:
        steps: list[int] = columns["steps"]
        self._points = {
            name: [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
            for name, values in columns["series"].items()
        }
        self.any = bool(steps)
        self.window = max(1, min(_LONGEST_WINDOW, len(self.points("episode/count")) // 5))
        """How many steps the beginning and the end of a run are."""

    def points(self, name: str) -> list[Point]:
        return self._points.get(name, [])

    def first_of(self, names: Iterable[str]) -> list[Point]:
        """The values of the first of these metrics that has any."""
        return next((points for name in names if (points := self.points(name))), [])

    def total(self, name: str) -> float | None:
        """The sum over all steps; None if none has a value."""
        points = self.points(name)
        return math.fsum(value for _, value in points) if points else None

    def lately(self, name: str) -> float | None:
        """The mean of the last steps, as many as `window` says."""
        points = self.points(name)
        return _mean(points[-self.window :]) if points else None


def overview(experiment: Experiment) -> dict[str, Any]:
    """All that the page shows. What can't be read is left out, and named among the findings."""
    reading = Reading()
    no_steps: dict[str, Any] = {"steps": [], "series": {}, "problem": ""}
    columns = reading.part(lambda: experiment.metrics(_NAMES), no_steps)
    figures = Figures(columns)
    health = [finding for check in HEALTH for finding in reading.part(partial(check, experiment, figures), [])]
    nothing: dict[str, Any] = {}
    tasks = reading.part(lambda: _tasks(experiment), nothing)
    problems = [*filter(None, [columns["problem"]]), *reading.problems]
    return {
        "verdict": verdict(figures),
        "health": [*(Finding("bad", problem) for problem in problems), *health],
        "totals": _totals(figures),
        "phases": {phase: total for phase in _PHASES if (total := figures.total(f"time/{phase}"))},
        **tasks,
    }


# ---------------------------------------------------------------- is it learning?


def verdict(figures: Figures) -> Verdict:
    """Judge by validation where there are two of them or more, else by the training reward."""
    if not figures.any:
        return Verdict("quiet", "No step has finished yet")
    validations, returns = figures.first_of(_VALIDATIONS), figures.first_of(_RETURNS)
    because = [*_of_validation(validations), *_of_returns(returns, figures), *_of_groups(figures)]
    trained = _trend(returns, figures.window)
    if (figures.lately("episode/failed_share") or 0.0) >= _MOST_FAIL:
        return Verdict("bad", "Most episodes fail", because)
    if len(validations) >= 2:
        return Verdict(*_by_validation(validations, trained, figures), because)
    titles: dict[int | None, tuple[Level, str]] = {
        None: ("quiet", "Too early to tell"), 1: ("good", "The training reward rises"),
        0: ("warn", "No clear change so far"), -1: ("bad", "The training reward falls"),
    }  # fmt: skip
    return Verdict(*titles[trained], because)


def _by_validation(points: list[Point], trained: int | None, figures: Figures) -> tuple[Level, str]:
    """Compare the first tenth of the validations, the best and the last; each is one validation if there are few."""
    size = max(1, len(points) // _PARTS)
    parts = [points[start : start + size] for start in range(len(points) % size, len(points), size)]
    best = max(parts, key=_mean)
    certain = _ERRORS * math.sqrt(2 * _chance(points, figures) / size)
    risen, since_best = _mean(parts[-1]) - _mean(parts[0]), _mean(best) - _mean(parts[-1])
    if risen > certain:
        if since_best > certain:
            return "warn", f"It learned, but has got worse since step {best[-1][0]}"
        return "good", "It is learning"
    if risen < -certain:
        return "bad", "It is getting worse"
    if since_best > certain:
        return "warn", f"What it had learned by step {best[-1][0]} is lost"
    if trained == 1:
        return "warn", "The training reward rises, validation doesn't"
    return "quiet", "No clear change so far"


def _chance(points: list[Point], figures: Figures) -> float:
    """The variance of one validation by chance alone: by the spread of its episodes if that is recorded."""
    counts = dict(figures.points("val/episode/usable"))
    known = [spread**2 / counts[step] for step, spread in figures.points("val/return/std") if counts.get(step)]
    return math.fsum(known) / len(known) if known else _noise(points)


def _noise(points: list[Point]) -> float:
    """The variance by chance, from the differences of neighbours: from one to the next, learning changes little."""
    if len(points) < _FEWEST_STEPS:
        return 0.0
    return math.fsum((b[1] - a[1]) ** 2 for a, b in pairwise(points)) / (2 * (len(points) - 1))


def _trend(points: list[Point], window: int) -> int | None:
    """1: the last steps are better than the first, -1: worse, 0: as good; None: too few to tell."""
    if len(points) < _FEWEST_STEPS:
        return None
    change = _mean(points[-window:]) - _mean(points[:window])
    certain = _ERRORS * math.sqrt(2 * _noise(points) / window)
    return 0 if abs(change) <= certain else 1 if change > 0 else -1


def _of_validation(points: list[Point]) -> list[Finding]:
    if not points:
        return [Finding("quiet", "No validation so far.")]
    if len(points) == 1:
        return [Finding("quiet", f"Validation {_number(points[0][1])} at step {points[0][0]}, the only one so far.")]
    best = max(points, key=lambda point: point[1])
    (first, start), (last, end) = points[0], points[-1]
    where = "its best" if best[1] == end else f"best {_number(best[1])} at step {best[0]}"
    return [Finding("quiet", f"Validation {_number(start)} at step {first}, {_number(end)} at step {last} ({where}).")]


def _of_returns(points: list[Point], figures: Figures) -> list[Finding]:
    if not points:
        return []
    first, last = points[: figures.window], points[-figures.window :]
    if len(points) == 1:
        return [Finding("quiet", f"Training reward {_number(first[0][1])} in {_steps(first)}.")]
    text = f"Training reward {_number(_mean(first))} in {_steps(first)}, {_number(_mean(last))} in {_steps(last)}."
    return [Finding("quiet", text)]


def _of_groups(figures: Figures) -> list[Finding]:
    groups, alike = figures.lately("credit/groups"), figures.lately("credit/zero_variance_groups")
    if not groups or alike is None:
        return []
    mixed = 1.0 - alike / groups
    where = _steps(figures.points("credit/groups")[-figures.window :])
    text = f"{_percent(mixed)} of the groups in {where} have different rewards. Only these teach."
    return [Finding("warn" if mixed < _FEW_MIXED else "quiet", text, "episodes")]


# ---------------------------------------------------------------- what is wrong?

Check: TypeAlias = Callable[[Experiment, Figures], list[Finding]]


def _failures(experiment: Experiment, figures: Figures) -> list[Finding]:
    """How many episodes failed lately, and of what, over the whole run."""
    share = figures.lately("episode/failed_share")
    found = []
    if share:
        level: Level = "bad" if share >= _MOST_FAIL else "warn" if share >= _MANY_FAIL else "quiet"
        where = _steps(figures.points("episode/failed_share")[-figures.window :])
        found.append(Finding(level, f"{_percent(share)} of the episodes in {where} failed, and count in no mean."))
    facets = _facets(experiment)
    for kind, count in list(facets.failures.items())[:_WARNINGS]:
        text = f"{count:,} of the recorded episodes failed with {kind}."
        found.append(Finding("warn", text, f"episodes?failure={quote(kind, safe='')}"))
    return found


def _cut(experiment: Experiment, figures: Figures) -> list[Finding]:
    """Episodes whose reply was cut, or whose prompt left no room for one."""
    episodes = figures.total("episode/count")
    found = []
    for name, what in (("length", "a reply cut at its maximum length"), ("overflow", "no room left in the context")):
        count = figures.total(f"outcome/{name}")
        if count and episodes:
            level: Level = "warn" if count / episodes >= _MANY_CUT else "quiet"
            text = f"{count:,.0f} of {episodes:,.0f} episodes ended with {what}."
            found.append(Finding(level, text, "episodes?status=truncated"))
    return found


def _dropped(experiment: Experiment, figures: Figures) -> list[Finding]:
    """Sampled tokens that reach no sample."""
    captured, dropped = figures.total("ledger/captured"), figures.total("ledger/dropped")
    if not captured or not dropped:
        return []
    share = dropped / captured
    text = f"{_percent(share)} of the sampled tokens were dropped, and trained nothing."
    return [Finding("warn" if share >= _MANY_DROPPED else "quiet", text, "charts?find=dropped")]


def _logged(experiment: Experiment, figures: Figures) -> list[Finding]:
    """The newest warnings and errors of the log."""
    levels: dict[str, Level] = {"warning": "warn", "error": "bad", "critical": "bad"}
    found: dict[str, Finding] = {}
    for line in reversed(experiment.log_tail()):
        level = levels.get(str(line.get("level", "")).lower())
        if level is not None:
            text = str(line.get("message", ""))
            found.setdefault(text, Finding(level, text[:_EXCERPT], "about"))
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
    counts = dict(figures.points("episode/count"))
    costs = [cost * counts.get(step, 0.0) for step, cost in figures.points("user/cost")]
    found = {
        "training_episodes": played,
        "validation_episodes": validated,
        "sampled_tokens": sampled if sampled is not None else figures.total("ledger/captured"),
        "trained_tokens": figures.total("ledger/trained"),
        "seconds": figures.total("time/step"),
        "seconds_per_step": figures.lately("time/step"),
        "cost": math.fsum(costs) if costs else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _facets(experiment: Experiment) -> Facets:
    store = experiment.store()
    return store.facets() if store is not None else Facets()


def _mean(points: list[Point]) -> float:
    return math.fsum(value for _, value in points) / len(points)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _steps(points: list[Point]) -> str:
    first, last = points[0][0], points[-1][0]
    return f"step {first}" if first == last else f"steps {first}–{last}"
