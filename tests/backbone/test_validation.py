"""What a validation counts: every episode that was played."""

from __future__ import annotations

import pytest

from ajet.backbone.episode_metrics import episode_metrics
from ajet.backbone.validation import validation_metrics
from ajet.schema.call_tree import CallTree
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus, Failure, Ledger


def episode(status: EpisodeStatus, reward: float | None = None, *, task: str = "t") -> Episode:
    failure = Failure("X", "x") if reward is None else None
    return Episode("e", task, status, CallTree(), Ledger(), group_id=task, reward=reward, failure=failure)


def group(task: str, *episodes: Episode) -> EpisodeGroup:
    usable = [one for one in episodes if one.usable]
    return EpisodeGroup(task, task, usable, [one for one in episodes if not one.usable])


WELL = episode(EpisodeStatus.COMPLETED, 1.0)
DROPPED = episode(EpisodeStatus.WORKFLOW_ERROR)


def test_failed_episodes_count_in_every_figure() -> None:
    metrics = validation_metrics([group("t", WELL, DROPPED, DROPPED, DROPPED)], 1.0)
    assert metrics["val/reward/mean"] == metrics["val/success"] == metrics["val/success/rate"] == 0.25
    assert metrics["val/reward/counted_as_zero"] == 3
    assert metrics["val/fault_share"] == 0
    assert metrics["val/success/pass@2"] == pytest.approx(0.5)
    assert metrics["val/all_pass@2"] == 0


def test_failed_episodes_count_with_their_failure_reward() -> None:
    metrics = validation_metrics([group("t", WELL, episode(EpisodeStatus.TIMEOUT, -1.0))], 1.0)
    assert (metrics["val/reward/mean"], metrics["val/success"]) == (0, 0.5)
    assert metrics["val/reward/counted_as_zero"] == 0


def test_faults_count_as_zero_and_their_share_stands_beside() -> None:
    fault, unjudged = episode(EpisodeStatus.ENGINE_ERROR), episode(EpisodeStatus.JUDGE_ERROR)
    stopped = episode(EpisodeStatus.CANCELLED)
    metrics = validation_metrics([group("t", WELL, WELL, fault, unjudged, stopped)], 1.0)
    assert (metrics["val/reward/mean"], metrics["val/success"], metrics["val/fault_share"]) == (0.5, 0.5, 0.5)


def test_a_training_step_counts_as_a_validation_does() -> None:
    metrics = episode_metrics([WELL, DROPPED, episode(EpisodeStatus.CANCELLED)])
    assert (metrics["reward/mean"], metrics["success/rate"]) == (0.5, 0.5)
    assert (metrics["episode/count"], metrics["episode/usable"]) == (3, 1)


def test_nothing_was_played() -> None:
    assert "val/reward/mean" not in validation_metrics([group("t", episode(EpisodeStatus.CANCELLED))], 1.0)
    assert validation_metrics([], 1.0) == {}
