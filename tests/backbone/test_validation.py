"""What a validation counts: usable episodes, with the share of the failed beside them."""

from __future__ import annotations

import pytest

from ajet.backbone.metrics import episode_metrics
from ajet.backbone.report import EarlyStop, validation_metrics
from ajet.schema.episode import CallTree, Episode, EpisodeGroup, EpisodeStatus, Failure, Ledger


def episode(status: EpisodeStatus, reward: float | None = None, *, task: str = "t") -> Episode:
    failure = Failure("X", "x") if reward is None else None
    return Episode("e", task, status, CallTree(), Ledger(), group_id=task, reward=reward, failure=failure)


def group(task: str, *episodes: Episode) -> EpisodeGroup:
    usable = [one for one in episodes if one.usable]
    return EpisodeGroup(task, task, usable, [one for one in episodes if not one.usable])


WELL = episode(EpisodeStatus.COMPLETED, 1.0)
BADLY = episode(EpisodeStatus.COMPLETED, 0.0)
DROPPED = episode(EpisodeStatus.WORKFLOW_ERROR)
FAULT, UNJUDGED = episode(EpisodeStatus.ENGINE_ERROR), episode(EpisodeStatus.JUDGE_ERROR)


def test_faults_count_in_no_figure_and_their_share_stands_beside() -> None:
    lost = [episode(EpisodeStatus.ENVIRONMENT_ERROR), FAULT, UNJUDGED, DROPPED]
    metrics = validation_metrics([group("t", WELL, BADLY, *lost, episode(EpisodeStatus.CANCELLED))], 1.0)
    assert metrics["val/return/mean"] == metrics["val/reward/mean"] == metrics["val/success"] == 0.5
    assert metrics["val/success/pass@2"] == 1.0
    assert metrics["val/all_pass@2"] == 0
    assert metrics["val/failed_share"] == pytest.approx(2 / 3)


def test_a_service_that_fails_half_of_the_time_does_not_lower_the_score() -> None:
    given = episode(EpisodeStatus.COMPLETED, 1.5)
    metrics = validation_metrics([group("a", given, DROPPED), group("b", given, DROPPED)], 1.0)
    assert (metrics["val/return/mean"], metrics["val/failed_share"]) == (1.5, 0.5)


def test_failed_episodes_count_with_their_failure_reward() -> None:
    metrics = validation_metrics([group("t", WELL, episode(EpisodeStatus.TIMEOUT, -1.0))], 1.0)
    assert (metrics["val/return/mean"], metrics["val/success"], metrics["val/failed_share"]) == (0, 0.5, 0)


def test_a_training_step_counts_as_a_validation_does() -> None:
    metrics = episode_metrics([WELL, DROPPED, episode(EpisodeStatus.CANCELLED)])
    assert (metrics["return/mean"], metrics["success/rate"], metrics["episode/failed_share"]) == (1.0, 1.0, 0.5)
    assert (metrics["episode/count"], metrics["episode/usable"]) == (3, 1)


def test_a_validation_whose_episodes_all_failed_has_no_score() -> None:
    metrics = validation_metrics([group("t", FAULT, DROPPED)], 1.0)
    assert metrics["val/failed_share"] == 1
    assert not {"val/return/mean", "val/reward/mean", "val/success"} & metrics.keys()
    early = EarlyStop("val/return/mean", patience=1, min_delta=0, target=0.0)
    early.look_at(1, metrics)
    assert early.reason is None


def test_nothing_was_played() -> None:
    assert "val/return/mean" not in validation_metrics([group("t", episode(EpisodeStatus.CANCELLED))], 1.0)
    assert validation_metrics([], 1.0) == {}
