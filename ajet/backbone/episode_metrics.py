"""Metrics of a batch of episodes, under the names all backbones use.

An episode is *usable* if it has a reward: the one it earned, or the one that `failure_reward` gives it. Rewards,
returns and successes are those of usable episodes; the share of the others stands beside them.

| prefix | what |
|---|---|
| `return/…` | what episodes earned in all (`trainer.credit.earned`), rewards of calls and agents included |
| `reward/…` | what the workflow or the judge gave the episode as a whole; without other rewards, the same |
| `reward/<part>` | the parts of composite rewards, before weighting, over the episodes that have them |
| `success/rate`, `success/pass@k` | pass@k over groups of at least k usable episodes |
| `episode/failed_share` | share of the played episodes that have no reward |
| `episode/without_calls` | how many ended well without a recorded model call |
| `episode/…` | counts and means: turns, calls, agents, sampled and trained tokens, reply length |
| `status/…`, `outcome/…`, `failure/…` | how many episodes ended how |
| `masked/…`, `dropped/…`, `fork/…` | tokens without loss by reason; calls that could not extend another, by reason |
| `time/…`, `user/…` | mean seconds of each phase of an episode; the workflow's own `log_metrics` |
| `tag/<tag>/return`, `…/reward`, `…/success` | by task tag |

Trainers add `train/…` (loss, kl, entropy, clip_fraction, grad_norm, lr, staleness, packing_ratio), `perf/…`
(tokens_per_second, memory_gb) and the step's own `time/step`, `time/rollout`, `time/judge`, `time/train`, `time/sync`.
Validation uses the same names under `val/`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ajet.observe.metrics import aggregate_log_metrics
from ajet.schema.episode import ROOT, Episode, EpisodeStatus
from ajet.trainer.credit import earned, summarise

FAULTS = (EpisodeStatus.ENGINE_ERROR, EpisodeStatus.ENVIRONMENT_ERROR, EpisodeStatus.JUDGE_ERROR)
"""How an episode ends that failed for reasons other than its workflow and model."""


def is_success(episode: Episode, threshold: float = 1.0) -> bool:
    """What the workflow or judge said; otherwise, whether the reward reaches the threshold."""
    if episode.is_success is not None:
        return episode.is_success
    return episode.reward is not None and episode.reward >= threshold


def pass_at_k(successes: int, tries: int, k: int) -> float:
    """The chance that at least one of k tries drawn from these succeeded (unbiased estimate)."""
    if tries - successes < k:
        return 1.0
    return 1.0 - math.prod((tries - successes - i) / (tries - i) for i in range(k))


def episode_metrics(
    episodes: Iterable[Episode], *, prefix: str = "", success_threshold: float = 1.0
) -> dict[str, float]:
    """The metrics of these episodes, including failed ones."""
    everyone = list(episodes)
    if not everyone:
        return {}
    ended = played(everyone)
    counted = usable(ended)
    result: dict[str, float] = {"episode/count": float(len(everyone)), "episode/usable": float(len(counted))}
    if ended:
        result["episode/failed_share"] = 1.0 - len(counted) / len(ended)
        result["episode/without_calls"] = float(sum(map(without_calls, ended)))
        result |= _sizes(ended)
    if counted:
        result |= _spread("return", [earned(summarise(episode)) for episode in counted])
        result |= _spread("reward", list(map(_reward, counted)))
        result |= _parts(counted)
        result |= _success(counted, success_threshold)
        result |= _by_tag(counted, success_threshold)
    result |= _reasons(everyone)
    times = [{f"episode_{name}": seconds for name, seconds in episode.timings.items()} for episode in everyone]
    result |= aggregate_log_metrics(times, "time")
    result |= aggregate_log_metrics((episode.log_metrics for episode in ended), "user")
    return {f"{prefix}{name}": value for name, value in result.items()}


def played(episodes: Iterable[Episode]) -> list[Episode]:
    """All but the episodes that were stopped because nobody needed them any more."""
    return [episode for episode in episodes if episode.status is not EpisodeStatus.CANCELLED]


def usable(episodes: Iterable[Episode]) -> list[Episode]:
    """The played episodes that have a reward: those that every figure is about."""
    return [episode for episode in played(episodes) if episode.usable]


def without_calls(episode: Episode) -> bool:
    """Whether it ended well and no model call of it, of any target, was recorded."""
    return episode.failure is None and not episode.outcomes and not episode.tree.calls


def by_group(episodes: Iterable[Episode]) -> list[list[Episode]]:
    """The episodes of each group; those that belong to none, by task."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id or episode.task_id, []).append(episode)
    return list(groups.values())


def _reward(episode: Episode) -> float:
    assert episode.reward is not None
    return float(episode.reward)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    mean = _mean(values)
    std = math.sqrt(_mean([(value - mean) ** 2 for value in values]))
    return {f"{name}/mean": mean, f"{name}/std": std, f"{name}/min": min(values), f"{name}/max": max(values)}


def _parts(counted: Sequence[Episode]) -> dict[str, float]:
    """The mean of each part, before weighting, over the episodes whose judge gave it."""
    given: dict[str, list[float]] = {}
    for episode in counted:
        for name, value in episode.reward_parts.items():
            given.setdefault(name, []).append(value)
    return {f"reward/{name}": _mean(values) for name, values in sorted(given.items())}


def _success(counted: Sequence[Episode], threshold: float) -> dict[str, float]:
    groups = [[is_success(episode, threshold) for episode in group] for group in by_group(counted)]
    result = {"success/rate": _mean([float(success) for group in groups for success in group])}
    for k in try_counts(groups):
        tried = [pass_at_k(sum(group), len(group), k) for group in groups if len(group) >= k]
        result[f"success/pass@{k}"] = _mean(tried)
    return result


def try_counts(groups: Sequence[Sequence[object]]) -> list[int]:
    """The k of pass@k: powers of two, and the size of the largest group."""
    largest = max(map(len, groups))
    return sorted({2**power for power in range(1, largest.bit_length()) if 2**power <= largest} | {largest} - {1})


def staleness(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """How many versions newer than the sampling policy the trained one is: mean and maximum over trained tokens."""
    tokens = lag = most = 0
    for call in (call for episode in episodes for call in episode.tree.calls if call.mask.any()):
        ends = [*(first for first, _ in call.versions[1:]), len(call.mask)]
        for (first, drawn), end in zip(call.versions, ends, strict=True):
            trained = int(call.mask[first:end].sum())
            tokens += trained
            lag += trained * (version - drawn)
            most = max(most, version - drawn) if trained else most
    return {"train/staleness": lag / tokens, "train/staleness/max": float(most)} if tokens else {}


def _sizes(counted: Sequence[Episode]) -> dict[str, float]:
    trees = [episode.tree for episode in counted]
    lengths = [float(len(tree.runs[call.run].ids)) for tree in trees for call in tree.calls if call.run != ROOT]
    result = {
        "episode/calls": _mean([float(len(tree.calls)) for tree in trees]),
        "episode/turns": _mean([float(max((call.turn + 1 for call in tree.calls), default=0)) for tree in trees]),
        "episode/agents": _mean([float(len({call.agent for call in tree.calls})) for tree in trees]),
        "episode/tokens": _mean([float(tree.tokens) for tree in trees]),
        "episode/sampled_tokens": _mean([float(tree.sampled_tokens) for tree in trees]),
        "episode/trained_tokens": _mean([float(tree.trained_tokens) for tree in trees]),
        "episode/sampled_tokens_total": float(sum(tree.sampled_tokens for tree in trees)),
    }
    if lengths:
        result["episode/reply_length"] = _mean(lengths)
        result["episode/reply_length_max"] = max(lengths)
    return result


def _reasons(episodes: Sequence[Episode]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts[f"status/{episode.status}"] += 1
        counts.update(f"outcome/{outcome}" for outcome in episode.outcomes)
        if episode.failure is not None:
            counts[f"failure/{episode.failure.kind}"] += 1
        counts.update({f"masked/{reason}": tokens for reason, tokens in episode.ledger.masked.items()})
        counts.update({f"dropped/{reason}": tokens for reason, tokens in episode.ledger.dropped.items()})
        counts.update(f"fork/{call.fork.reason}" for call in episode.tree.calls if call.fork is not None)
    return {name: float(count) for name, count in sorted(counts.items())}


def _by_tag(counted: Sequence[Episode], threshold: float) -> dict[str, float]:
    tags: dict[str, list[Episode]] = {}
    for episode in counted:
        if episode.tag:
            tags.setdefault(episode.tag, []).append(episode)
    result: dict[str, float] = {}
    for tag, tagged in sorted(tags.items()):
        result[f"tag/{tag}/return"] = _mean([earned(summarise(episode)) for episode in tagged])
        result[f"tag/{tag}/reward"] = _mean(list(map(_reward, tagged)))
        result[f"tag/{tag}/success"] = _mean([float(is_success(episode, threshold)) for episode in tagged])
    return result


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
