"""Validation: how many episodes of the validation tasks run, and the metrics they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ajet.backbone.episode_metrics import by_group, episode_metrics, is_success, try_counts, usable
from ajet.backbone.failures import FailureWatch, warn_of
from ajet.backbone.plan import validation_repeats
from ajet.schema.episode import EpisodeGroup
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config


def validation_metrics(groups: Sequence[EpisodeGroup], threshold: float) -> dict[str, float]:
    """Under `val/`: mean return and reward, success, pass@k, all-pass@k, by tag; all over the usable episodes.

    `val/failed_share` is the share of the others. If every episode failed, there is no score.
    """
    episodes = [episode for group in groups for episode in (*group.episodes, *group.failed)]
    metrics = episode_metrics(episodes, prefix="val/", success_threshold=threshold)
    if "val/episode/failed_share" in metrics:
        metrics["val/failed_share"] = metrics["val/episode/failed_share"]
    tried = [[is_success(episode, threshold) for episode in group] for group in by_group(usable(episodes))]
    if not tried:
        return metrics
    metrics["val/success"] = metrics["val/success/rate"]
    for k in try_counts(tried):
        enough = [(sum(group), len(group)) for group in tried if len(group) >= k]
        metrics[f"val/all_pass@{k}"] = sum(math.comb(p, k) / math.comb(n, k) for p, n in enough) / len(enough)
    return metrics


def evaluate(config: Config) -> dict[str, float]:
    """Run validation only, with the tasks, workflow, judge and engine of this config."""
    from ajet.runtime.runtime import Runtime
    from ajet.task_reader import build_reader, read_validation_tasks

    tasks = read_validation_tasks(build_reader(config))
    if not tasks:
        raise ConfigError("ajet.task_reader: this config has no validation tasks")
    with Runtime(config) as runtime:
        repeats = validation_repeats(config)
        groups = runtime.run(runtime.pool.run_groups(tasks, num_repeat=repeats, validation=True))
    FailureWatch(config).look_at_groups("the validation", groups)
    metrics = validation_metrics(groups, config.ajet.task_judge.success_threshold)
    warn_of(0, metrics)
    return metrics
