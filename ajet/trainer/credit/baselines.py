"""Compares a call's value with the same agent's calls in the group's other episodes. The baseline decides which calls
those are: anywhere in the episode, at the same turn, or in the same state. It is a setting, and never depends on a
batch's content.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import NamedTuple

from ajet.trainer.credit.summary import CallSummary, EpisodeSummary, Returns

SAME = 1e-9
"""Values closer than this, relative to their size, are the same."""


class Baseline(StrEnum):
    """Which calls are compared with each other."""

    EPISODE = "episode"
    """Compares all of an agent's calls by the agent's total return in the episode."""
    TURN = "turn"
    """Compares an agent's calls of the same turn by their return to go."""
    STATE = "state"
    """Compares by the total return and, in addition, calls that answer the same observation by their return to go
    (GiGPO)."""


class Comparison(NamedTuple):
    """What an estimator sees: a call's value, and the values it is compared with. An episode is one of them, with the
    mean over its compared calls; in the second part of `baseline: state`, each visit of the state is one."""

    value: float
    own: float
    """The mean value of its own sample."""
    mean: float
    """The mean of `values`, its own included."""
    deviation: float
    """Their unbiased standard deviation, and how the calls within an episode differ, which `values` don't show."""
    samples: int
    """How many they are, at least 2."""
    values: tuple[float, ...]
    """All of them, its own included."""


Formula = Callable[[Comparison], float]
"""An advantage estimator: turns a comparison into an advantage. It isn't asked where all values are the same."""


class Place(NamedTuple):
    """A call of one of the episodes that are compared."""

    episode: int
    call: int


@dataclass(slots=True)
class Compared:
    """The advantage of every call, with diagnostics."""

    advantages: list[list[float]]
    varied: bool = False
    """Whether any compared values differ where a token is trained."""
    alone: int = 0
    """Agents with trained calls but no other episode to compare with. Their advantage is 0."""
    fallbacks: int = 0
    """Trained calls whose turn or state occurs in no other episode: they have the episode baseline's advantage."""


class Cell(NamedTuple):
    """Calls that were compared with each other."""

    advantages: dict[Place, float]
    varied: bool
    """Whether their values differ. If not, all advantages are 0."""


def compare(
    episodes: Sequence[EpisodeSummary],
    returns: Sequence[Returns],
    baseline: Baseline,
    formula: Formula,
    state_weight: float = 1.0,
) -> Compared:
    """The advantages of these episodes' calls, compared with each other."""
    result = Compared([[0.0] * len(episode.calls) for episode in episodes])
    whole = [one.whole for one in returns]
    to_go = [one.to_go for one in returns]
    by_agent: dict[str, Cell] = {}
    alone = set()
    for (agent, _), places in _by(episodes, lambda _place, call: (call.agent, None)).items():
        by_agent[agent] = _cell(episodes, places, whole, formula)
        if _episodes_of(places) < 2:
            alone.add(agent)
            result.alone += any(_trained(episodes, place) for place in places)
    for (agent, _), places in _by(episodes, _position(baseline, returns)).items():
        general = by_agent[agent]
        trained = sum(_trained(episodes, place) for place in places)
        shared = baseline is not Baseline.EPISODE and _episodes_of(places) > 1
        if not shared:
            advantages, varied = general.advantages, general.varied
            result.fallbacks += trained if baseline is not Baseline.EPISODE and agent not in alone else 0
        elif baseline is Baseline.TURN:
            advantages, varied = _cell(episodes, places, to_go, formula)
        else:
            step = _cell(episodes, places, to_go, formula, occurrences=True)
            varied = general.varied or step.varied
            advantages = {place: general.advantages[place] + state_weight * step.advantages[place] for place in places}
        result.varied |= varied and trained > 0
        for place in places:
            result.advantages[place.episode][place.call] = advantages[place]
    return result


Position = tuple[str, Hashable]
"""An agent, and the feature that its calls at this position share."""


def _position(baseline: Baseline, returns: Sequence[Returns]) -> Callable[[Place, CallSummary], Position]:
    if baseline is Baseline.TURN:
        return lambda place, call: (call.agent, returns[place.episode].turn[place.call])
    if baseline is Baseline.STATE:
        return lambda _, call: (call.agent, call.state)
    return lambda _, call: (call.agent, None)


class SampleStatistics(NamedTuple):
    """Statistics of samples that have equal weight, however many values they hold."""

    mean: float
    deviation: float
    """Unbiased; 0 for a single sample."""
    size: int
    """How many samples."""
    varied: bool


def statistics(samples: Sequence[Sequence[float]]) -> SampleStatistics:
    """Compute the statistics. The values of a sample share its weight."""
    count = len(samples)
    mean = sum(sum(sample) / len(sample) for sample in samples) / count
    square = sum(sum((value - mean) ** 2 for value in sample) / len(sample) for sample in samples)
    low, high = min(map(min, samples)), max(map(max, samples))
    varied = high - low > SAME * max(1.0, abs(low), abs(high))
    return SampleStatistics(mean, sqrt(square / (count - 1)) if count > 1 else 0.0, count, varied)


def _cell(
    episodes: Sequence[EpisodeSummary],
    places: Sequence[Place],
    values: Sequence[Sequence[float]],
    formula: Formula,
    *,
    occurrences: bool = False,
) -> Cell:
    """Compare these calls with each other.

    An episode is one sample, with the values of its trained calls; with `occurrences` every call is a sample.
    """
    samples: dict[Hashable, list[float]] = {}
    for place in _counted(episodes, places):
        samples.setdefault(place if occurrences else place.episode, []).append(values[place.episode][place.call])
    found = statistics(list(samples.values()))
    if not found.varied or _episodes_of(places) < 2:
        return Cell(dict.fromkeys(places, 0.0), varied=False)
    means = tuple(sum(sample) / len(sample) for sample in samples.values())
    advantages = {}
    for place in places:
        value = values[place.episode][place.call]
        own = samples.get(place if occurrences else place.episode, [value])
        compared = Comparison(value, sum(own) / len(own), found.mean, found.deviation, found.size, means)
        advantages[place] = formula(compared)
    return Cell(advantages, varied=True)


def _by(
    episodes: Sequence[EpisodeSummary], key: Callable[[Place, CallSummary], Position]
) -> dict[Position, list[Place]]:
    found: dict[Position, list[Place]] = {}
    for number, episode in enumerate(episodes):
        for index, call in enumerate(episode.calls):
            place = Place(number, index)
            found.setdefault(key(place, call), []).append(place)
    return found


def _counted(episodes: Sequence[EpisodeSummary], places: Sequence[Place]) -> list[Place]:
    """The trained calls of an episode, or all calls if none is trained: its return still counts."""
    trained = {place.episode for place in places if _trained(episodes, place)}
    return [place for place in places if place.episode not in trained or _trained(episodes, place)]


def _trained(episodes: Sequence[EpisodeSummary], place: Place) -> bool:
    return episodes[place.episode].calls[place.call].tokens > 0


def _episodes_of(places: Iterable[Place]) -> int:
    return len({place.episode for place in places})
