"""Metrics under the names that all backbones share: those of a batch of episodes, and the translations into them.

An episode is *usable* if it has a reward: the one it earned, or the one that `failure_reward` gives it. Rewards,
returns and successes are those of usable episodes; the share of the others stands beside them.

`docs/metrics.md` explains every name. A metric of verl's or Trinity's without a shared name keeps its own, under
`verl/` or `trinity/`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ajet.observe.metrics import aggregate_log_metrics
from ajet.observe.statistics import Share
from ajet.schema.episode import ROOT, CallTree, Episode, EpisodeStatus, Ledger
from ajet.trainer.credit import EpisodeCredit, earned, summarise

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


def pass_at(solved: Sequence[Sequence[bool]]) -> dict[int, Share]:
    """pass@1 and further k, each over the tasks with at least k tries. Empty without tasks."""
    counts = (1, *try_counts(solved)) if solved else ()
    return {k: Share.of([pass_at_k(sum(group), len(group), k) for group in solved if len(group) >= k]) for k in counts}


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
        result |= _parts(counted)  # first: a part may have the name of a statistic
        result |= _spread("return", [earned(summarise(episode)) for episode in counted])
        result |= _spread("reward", list(map(_reward, counted)))
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
    return result | {f"success/pass@{k}": share.value for k, share in pass_at(groups).items() if k > 1}


def try_counts(groups: Sequence[Sequence[object]]) -> list[int]:
    """The k of pass@k: powers of two, and the size of the largest group."""
    largest = max(map(len, groups))
    return sorted({2**power for power in range(1, largest.bit_length()) if 2**power <= largest} | {largest} - {1})


def ledger_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Where the step's captured tokens went."""
    total = Ledger()
    for episode in episodes:
        total.add(episode.ledger)
    counts = {"captured": total.captured, "trained": total.trained}
    counts |= {"masked": sum(total.masked.values()), "dropped": sum(total.dropped.values())}
    return {f"ledger/{name}": float(count) for name, count in counts.items()}


def staleness(batch: Iterable[tuple[CallTree, EpisodeCredit]], version: int) -> dict[str, float]:
    """How many versions newer than the sampling policy the trained one is: mean and maximum over trained tokens. Calls
    without an entry, as in groups whose rewards are all equal, aren't trained."""
    tokens = lag = most = 0
    pairs = ((call, given) for tree, credit in batch for call, given in zip(tree.calls, credit.calls, strict=True))
    for call in (call for call, given in pairs if given.entries):
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


# ---------------------------------------------------------------- translations


STEP = {
    "return/mean": "train/return/mean",
    "reward/mean": "train/reward/mean",
    "success/rate": "train/success",
    "loss/total": "train/loss",
    "loss/policy": "train/policy_loss",
    "loss/kl": "train/kl",
    "loss/entropy": "train/entropy",
    "loss/clip_fraction": "train/clip_fraction",
    "loss/sampler_gap_max": "train/sampler_gap",
    "tokens/packing_ratio": "train/packing_ratio",
}
"""Metrics of a training step's episodes and of the embedded trainer that also appear under a shared name."""

ACTOR = {
    "actor/pg_loss": "train/policy_loss",
    "actor/kl_loss": "train/kl",
    "actor/entropy": "train/entropy",
    "actor/clip_fraction": "train/clip_fraction",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
}
"""verl's names, which Trinity has from it."""

VERL = ACTOR | {
    "actor/loss": "train/loss",
    "actor/sampler_gap_max": "train/sampler_gap",
    "timing_s/step": "time/step",
    "timing_s/gen": "time/rollout",
    "timing_s/update_actor": "time/train",
    "timing_s/update_weights": "time/sync",
    "timing_s/save_checkpoint": "time/checkpoint",
}
SUMS_OF_VERL = {"actor/pg_loss", "actor/kl_loss", "actor/clip_fraction", "actor/ratio"}
"""Sums of weight x value; the weights sum up to 1 with some norms alone."""
KEPT_BY_VERL = ("return/", "reward/", "success/", "episode/", "ledger/", "status/", "outcome/", "failure/",
                "masked/", "dropped/", "fork/", "time/", "user/", "tag/", "val/", "credit/", "train/")  # fmt: skip
"""Prefixes of names that reach verl from our sampler and collector, and come back as they are."""

TRINITY = ACTOR | {
    **{own: shared for own, shared in STEP.items() if own.startswith("loss/")},
    "actor/final_loss": "train/loss",
    "time/train_step": "time/train",
    "time/sync_weight": "time/sync",
    "time/save_checkpoint": "time/checkpoint",
    "explorer/time/wait_explore_step": "time/rollout",
}
KEPT_BY_TRINITY = ("train/", "tokens/", "loss/", "time/step", "time/update", "time/logprobs", "time/train_", "pack/",
                   "perf/")  # fmt: skip
"""Prefixes of names that reach Trinity from our trainer, and come back as they are."""


def step_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those of a training step's metrics that have a shared name, under that name."""
    return {shared: metrics[own] for own, shared in STEP.items() if own in metrics}


def from_verl(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Translate one line of verl's metrics file; text is left out."""
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
    weight = numbers.pop("actor/weight", 0.0) or 1.0
    numbers |= {key: numbers[key] / weight for key in SUMS_OF_VERL & numbers.keys()}
    named = _renamed(numbers, VERL, KEPT_BY_VERL, "verl/")
    if "time/rollout" in named:
        named |= token_rate(named, named["time/rollout"])
    return named


def token_rate(metrics: Mapping[str, float], rollout_s: float) -> dict[str, float]:
    """Sampled tokens per second of a step's rollout."""
    return {"perf/tokens_per_second": metrics.get("episode/sampled_tokens_total", 0.0) / max(rollout_s, 1e-9)}


def from_trinity(metrics: Mapping[str, float]) -> dict[str, float]:
    """Translate one line of Trinity's metrics."""
    return _renamed(metrics, TRINITY, KEPT_BY_TRINITY, "trinity/")


def _renamed(
    metrics: Mapping[str, float], names: Mapping[str, str], kept: tuple[str, ...], prefix: str
) -> dict[str, float]:
    return {
        names.get(key) or (key if key.startswith(kept) else f"{prefix}{key}"): value for key, value in metrics.items()
    }
