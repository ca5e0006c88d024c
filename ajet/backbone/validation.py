"""Validation: how many episodes of the validation tasks run, and the metrics they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ajet.backbone.plan import validation_repeats
from ajet.observe.episode_metrics import episode_metrics, is_success
from ajet.schema.episode import Episode, EpisodeGroup
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.config import Config


def validation_metrics(groups: Sequence[EpisodeGroup], threshold: float) -> dict[str, float]:
    """Under `val/`: mean reward, success, pass@k, all-pass@k, by tag. A failed episode counts as unsuccessful."""
    episodes = [episode for group in groups for episode in (*group.episodes, *group.failed)]
    metrics = episode_metrics(episodes, prefix="val/", success_threshold=threshold)
    tried = [_tries(group, threshold) for group in groups]
    tried = [(passed, tries) for passed, tries in tried if tries]
    if not tried:
        return metrics
    metrics["val/success"] = sum(passed for passed, _ in tried) / sum(tries for _, tries in tried)
    largest = max(tries for _, tries in tried)
    for k in sorted({2**power for power in range(1, largest.bit_length()) if 2**power <= largest} | {largest} - {1}):
        enough = [(passed, tries) for passed, tries in tried if tries >= k]
        metrics[f"val/all_pass@{k}"] = sum(math.comb(p, k) / math.comb(n, k) for p, n in enough) / len(enough)
    return metrics


def evaluate(config: Config) -> dict[str, float]:
    """Run validation only, with the tasks, workflow, judge and engine of this config."""
    from ajet.runtime.runtime import Runtime
    from ajet.task_reader import build_reader, read_validation_tasks

    tasks = read_validation_tasks(build_reader(config.ajet.task_reader, config.base_dirs))
    if not tasks:
        raise ConfigError("ajet.task_reader: this config has no validation tasks")
    with Runtime(config) as runtime:
        repeats = validation_repeats(config)
        groups = runtime.run(runtime.pool.run_groups(tasks, num_repeat=repeats, validation=True))
    return validation_metrics(groups, config.ajet.task_judge.success_threshold)


def _tries(group: EpisodeGroup, threshold: float) -> tuple[int, int]:
    """How many episodes succeeded, and how many there are."""
    everyone: list[Episode] = [*group.episodes, *group.failed]
    return sum(is_success(episode, threshold) for episode in everyone), len(everyone)
