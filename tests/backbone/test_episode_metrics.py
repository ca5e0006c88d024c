"""Counting episodes: which of them the figures are about, what they earned, reasons, and how old the policy was; and
verl's, Trinity's and our own metrics under shared names."""

from __future__ import annotations

import random

import pytest

from ajet.backbone.metrics import episode_metrics, from_trinity, from_verl, staleness, step_names
from ajet.context_tracker.conversation import MessageCalls
from ajet.schema.chat import ChatReply, ChatRequest, Completion
from ajet.schema.episode import CallTree, Episode, EpisodeStatus, Failure, Ledger, Outcome
from ajet.trainer.credit import CallCredit, EpisodeCredit
from support.synthetic_run import Vocabulary, math_episode


def episode(task: int = 0) -> Episode:
    return math_episode(Vocabulary(), random.Random(task), task=task)


def rewarded(reward: float, **rewards_of_calls: float) -> Episode:
    """`call_0=0.5`: the first call has a reward of its own."""
    one = episode()
    one.reward, one.failure, one.status, one.is_success = reward, None, EpisodeStatus.COMPLETED, None
    for name, value in rewards_of_calls.items():
        one.tree.calls[int(name.removeprefix("call_"))].reward = value
    return one


def failed(status: EpisodeStatus = EpisodeStatus.WORKFLOW_ERROR) -> Episode:
    return Episode("f", "t", status, CallTree(), Ledger(), failure=Failure("OSError", "the service is down"))


def test_what_infrastructure_broke_counts_in_no_figure() -> None:
    given = [rewarded(1.5) for _ in range(4)]
    given[0].reward_parts = {"tests": 0.5}
    found = episode_metrics([*given, *(failed() for _ in range(6)), failed(EpisodeStatus.CANCELLED)])
    assert found["return/mean"] == found["reward/mean"] == found["reward/min"] == 1.5
    assert found["success/rate"] == found["success/pass@4"] == 1.0
    assert found["reward/tests"] == 0.5
    assert found["episode/failed_share"] == pytest.approx(0.6)
    assert (found["episode/count"], found["episode/usable"]) == (11, 4)


def test_a_part_with_the_name_of_a_statistic_stands_in_for_none() -> None:
    one = rewarded(1.5)
    one.reward_parts = {"mean": 0.25, "max": 0.5}
    found = episode_metrics([one, rewarded(2.5)])
    assert (found["reward/mean"], found["reward/max"]) == (2.0, 2.5)


def test_what_the_model_did_counts_with_its_configured_reward() -> None:
    cut = rewarded(-1.0)
    cut.status, cut.outcomes = EpisodeStatus.TRUNCATED, (Outcome.LENGTH,)
    cut.failure = Failure("LengthError", "a reply was cut")
    found = episode_metrics([rewarded(1.0), cut])
    assert (found["return/mean"], found["success/rate"], found["episode/failed_share"]) == (0.0, 0.5, 0.0)


def test_where_every_episode_failed_there_is_no_figure() -> None:
    found = episode_metrics([failed(), failed(EpisodeStatus.ENGINE_ERROR)])
    assert found["episode/failed_share"] == 1.0
    assert not [name for name in found if name.startswith(("return/", "reward/", "success/"))]


def test_the_return_adds_the_rewards_of_calls_to_the_episodes() -> None:
    plain, paid = rewarded(1.0), rewarded(0.0, call_0=0.25, call_1=9.0, call_2=0.5)
    assert not paid.tree.calls[1].mask.any(), "a retry, of which nothing is trained"
    found = episode_metrics([plain, paid])
    assert (found["return/min"], found["return/max"]) == (0.75, 1.0)
    assert found["return/mean"] == 0.875 and found["reward/mean"] == 0.5


def test_the_return_is_that_of_the_agents_that_are_trained() -> None:
    one = rewarded(0.0)
    one.agent_rewards = {one.tree.calls[0].agent: 0.75, "opponent": -0.75}
    one.tree.calls[-1].agent = "opponent"
    one.tree.calls[-1].mask[:] = False
    one.tag = "duel"
    assert episode_metrics([one])["return/mean"] == episode_metrics([one])["tag/duel/return"] == 0.75


def test_a_model_that_reports_no_tokens_has_a_return_too() -> None:
    one = Episode("m", "t", EpisodeStatus.COMPLETED, CallTree(), Ledger(), reward=0.5)
    calls = MessageCalls()
    for prefilled in ("So", "And so"):
        said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": prefilled}]
        message = {"role": "assistant", "content": "!"}
        reply = ChatReply("c", message, "stop", "!", [], Completion([], [], "stop"), counted=(3, 1))
        calls.add("c", ChatRequest(said, agent="a"), reply, -1, 0.0, 0.1)
    one.tree.calls += calls.calls
    found = episode_metrics([one])
    assert (found["return/mean"], found["episode/without_calls"]) == (0.5, 0.0)


def test_episodes_without_a_call_are_counted_unless_they_failed() -> None:
    silent = Episode("s", "t", EpisodeStatus.COMPLETED, CallTree(), Ledger(), reward=1.0)
    overflown = Episode("o", "t", EpisodeStatus.TRUNCATED, CallTree(), Ledger(), reward=0.0)
    overflown.outcomes = (Outcome.OVERFLOW,)
    assert episode_metrics([silent, overflown, failed(), rewarded(1.0)])["episode/without_calls"] == 1


def test_reasons_are_counted_by_token() -> None:
    one = episode()
    one.ledger.masked, one.ledger.dropped = {"not_trainable": 7}, {"timeout": 3}
    found = episode_metrics([one, one])
    assert found["masked/not_trainable"] == 14 and found["dropped/timeout"] == 6
    assert found[f"status/{one.status}"] == 2


def test_staleness_weighs_by_trained_tokens() -> None:
    one = episode()
    first, *others = one.tree.calls
    for call in others:
        call.mask[:] = False
    first.mask[:] = True
    half = len(first.mask) // 4
    first.versions = [(0, 3), (half, 5)]
    mean = 2 * half / len(first.mask)
    left_out = episode()  # of an older version, in a group whose rewards are all equal
    batch = [(one.tree, trained(one)), (left_out.tree, EpisodeCredit("e", [CallCredit() for _ in left_out.tree.calls]))]
    assert staleness(batch, version=5) == {"train/staleness": pytest.approx(mean), "train/staleness/max": 2.0}
    first.mask[:half] = False
    assert staleness(batch, version=5) == {"train/staleness": 0.0, "train/staleness/max": 0.0}, (
        "what is masked does not count"
    )
    first.mask[:] = False
    assert staleness(batch, version=5) == {}


def trained(one: Episode) -> EpisodeCredit:
    return EpisodeCredit("e", [CallCredit([(1.0, 1.0)]) for _ in one.tree.calls])


def test_verls_metrics_get_our_names() -> None:
    given = {"actor/grad_norm": 0.5, "timing_s/gen": 2, "reward/mean": 0.25, "critic/score/mean": 9.0, "note": "text"}
    given |= {"episode/sampled_tokens_total": 40.0, "perf/throughput": 3.0}  # verl's is of all tokens, over the step
    given |= {"actor/kl_loss": 0.125, "actor/weight": 0.5}  # as with `dr_grpo`: a sum
    assert from_verl(given) == {
        "train/kl": 0.25,
        "train/grad_norm": 0.5,
        "time/rollout": 2.0,
        "reward/mean": 0.25,
        "episode/sampled_tokens_total": 40.0,
        "perf/tokens_per_second": 20.0,
        "verl/critic/score/mean": 9.0,
        "verl/perf/throughput": 3.0,
    }


def test_trinitys_metrics_get_our_names() -> None:
    given = {"actor/grad_norm": 0.5, "time/train_step": 2.0, "pack/rows": 3.0, "rollout/x": 9.0}
    assert from_trinity(given) == {
        "train/grad_norm": 0.5,
        "time/train": 2.0,
        "pack/rows": 3.0,
        "trinity/rollout/x": 9.0,
    }


def test_a_step_adds_the_shared_names() -> None:
    given = {"reward/mean": 0.5, "loss/total": 2.0, "pack/rows": 3.0}
    assert step_names(given) == {"train/reward/mean": 0.5, "train/loss": 2.0}
