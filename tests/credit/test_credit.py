"""Worked numbers for each estimator, and the rules that hold for all of them."""

from __future__ import annotations

import json
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.credit import (
    AdvantageEstimator,
    CallSummary,
    CreditSettings,
    EpisodeSummary,
    LossNorm,
    ZeroVariance,
    compute_credit,
    summarise,
)
from ajet.credit.estimators import Overlong, call_values
from ajet.schema.call_tree import ROOT, Call, CallTree, Run
from ajet.schema.episode import Episode, EpisodeStatus, Ledger


def single(reward: float, tokens: int = 10, name: str = "e") -> EpisodeSummary:
    return EpisodeSummary(name, "g", reward, [CallSummary("a", tokens, leaves=[0] if tokens else [])])


def chain(reward: float, tokens: list[int], rewards: list[float | None] | None = None) -> EpisodeSummary:
    own = rewards or [None] * len(tokens)
    last = len(tokens) - 1
    calls = [
        CallSummary("a", n, r, i + 1 if i < last else ROOT, [last])
        for i, (n, r) in enumerate(zip(tokens, own, strict=True))
    ]
    return EpisodeSummary("e", "g", reward, calls)


def advantages(groups: list[list[EpisodeSummary]], **options: object) -> list[list[float]]:
    credit = compute_credit(groups, CreditSettings(**options))  # type: ignore[arg-type]
    return [[call.advantage for call in episode.calls] for episode in credit.episodes]


def test_grpo_worked() -> None:
    # rewards 1, 0, 0, 1: mean 0.5, unbiased std sqrt(4 * 0.25 / 3)
    group = [single(1.0), single(0.0), single(0.0), single(1.0)]
    expected = 0.5 / (sqrt(1.0 / 3.0) + 1e-6)
    assert [a for (a,) in advantages([group])] == pytest.approx([expected, -expected, -expected, expected])


def test_dr_grpo_worked() -> None:
    group = [single(3.0), single(0.0), single(0.0)]
    assert [a for (a,) in advantages([group], estimator=AdvantageEstimator.DR_GRPO)] == pytest.approx([2.0, -1.0, -1.0])


def test_rloo_worked() -> None:
    # others of 3 have mean 0; others of a 0 have mean 1.5
    group = [single(3.0), single(0.0), single(0.0)]
    assert [a for (a,) in advantages([group], estimator=AdvantageEstimator.RLOO)] == pytest.approx([3.0, -1.5, -1.5])


def test_reinforce_plus_plus_worked() -> None:
    # over the batch: mean 2, std sqrt(8/5); the groups play no part, not even the one without variance
    groups = [[single(4.0), single(2.0)], [single(0.0), single(2.0)], [single(2.0), single(2.0)]]
    std = sqrt(8 / 5) + 1e-6
    expected = [2 / std, 0.0, -2 / std, 0.0, 0.0, 0.0]
    assert [a for (a,) in advantages(groups, estimator=AdvantageEstimator.REINFORCE_PLUS_PLUS)] == pytest.approx(
        expected
    )


def test_an_episode_of_many_calls_weighs_no_more_than_one_of_one() -> None:
    one = advantages([[single(1.0), single(0.0), single(0.0)]])
    many = advantages([[chain(1.0, [3] * 9), single(0.0), chain(0.0, [1, 1])]])
    assert many[0] == pytest.approx([one[0][0]] * 9)
    assert many[2] == pytest.approx([one[2][0]] * 2)


def test_gamma_discounts_from_call_to_call() -> None:
    episode = chain(8.0, [1, 1, 1])
    assert call_values(episode, CreditSettings(gamma=0.5)) == [2.0, 4.0, 8.0]


def test_rewards_of_calls_replace_the_episodes() -> None:
    # 1 + 0.5 * (0 + 0.5 * 4); the last call has a reward of its own, so the episode's 99 is not added
    episode = chain(99.0, [1, 1, 1], [1.0, None, 4.0])
    assert call_values(episode, CreditSettings(gamma=0.5)) == [2.0, 2.0, 4.0]


def test_shaping_rewards_add_to_the_episodes() -> None:
    assert call_values(chain(1.0, [1, 1], [0.25, None]), CreditSettings()) == [1.25, 1.0]


def test_calls_of_different_value_stand_in_equal_shares() -> None:
    # episode values: (2, 0) and (0, 0): mean 0.5; var = (mean(2.25, 0.25) + 0.25) / 1 = 1.5
    group = [chain(0.0, [1, 1], [2.0, 0.0]), chain(0.0, [1, 1], [0.0, 0.0])]
    std = sqrt(1.5) + 1e-6
    got = advantages([group], gamma=0.0)
    assert got[0] == pytest.approx([1.5 / std, -0.5 / std])
    assert got[1] == pytest.approx([-0.5 / std, -0.5 / std])


def test_per_agent_groups_compare_like_with_like() -> None:
    def pair(solver: float, critic: float) -> EpisodeSummary:
        calls = [CallSummary("solver", 5, leaves=[0]), CallSummary("critic", 5, leaves=[1])]
        return EpisodeSummary("e", "g", 0.0, calls, {"solver": solver, "critic": critic})

    group = [pair(10.0, 1.0), pair(12.0, 0.0)]
    apart = advantages([group], estimator=AdvantageEstimator.DR_GRPO, per_agent_groups=True)
    assert apart == [pytest.approx([-1.0, 0.5]), pytest.approx([1.0, -0.5])]
    together = advantages([group], estimator=AdvantageEstimator.DR_GRPO)
    assert together[0] == pytest.approx([4.25, -4.75])


def test_zero_variance_groups() -> None:
    groups = [[single(1.0), single(1.0)], [single(1.0), single(0.0)]]
    skip = compute_credit(groups, CreditSettings())
    assert skip.zero_variance_groups == 1
    assert [episode.skipped for episode in skip.episodes] == [True, True, False, False]
    assert [call.weight for episode in skip.episodes for call in episode.calls] == [0.0, 0.0, 1 / 20, 1 / 20]
    keep = compute_credit(groups, CreditSettings(zero_variance=ZeroVariance.KEEP))
    assert [call.weight for episode in keep.episodes for call in episode.calls] == [1 / 40] * 4
    assert keep.episodes[0].calls[0].advantage == 0.0


def test_a_failed_attempt_without_trained_tokens_still_counts_in_the_statistics() -> None:
    group = [single(1.0), single(0.0, tokens=0)]
    assert advantages([group], estimator=AdvantageEstimator.DR_GRPO)[0] == [0.5]


def test_norms_worked() -> None:
    group = [single(1.0, 10), chain(0.0, [10, 20])]

    def weights(norm: LossNorm) -> list[float]:
        credit = compute_credit([group], CreditSettings(loss_norm=norm, dr_grpo_length=100))
        return [call.weight for episode in credit.episodes for call in episode.calls]

    assert weights(LossNorm.TOKEN_MEAN) == pytest.approx([1 / 40] * 3)
    assert weights(LossNorm.SEQUENCE_MEAN) == pytest.approx([1 / 20, 1 / 60, 1 / 60])
    assert weights(LossNorm.DR_GRPO) == pytest.approx([1 / 200] * 3)


def test_overlong_reward() -> None:
    overlong = Overlong(limit=100, buffer=20, penalty=1.0)
    assert [overlong.shaped(1.0, n) for n in (80, 90, 100, 500)] == [1.0, 0.5, 0.0, 0.0]
    assert call_values(single(1.0, 90), CreditSettings(overlong=overlong)) == [0.5]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.sampled_from(list(AdvantageEstimator)))
@settings(max_examples=50, deadline=None)
def test_advantages_sum_to_nothing(rewards: list[float], estimator: AdvantageEstimator) -> None:
    got = advantages([[single(r) for r in rewards]], estimator=estimator, zero_variance=ZeroVariance.KEEP)
    assert sum(a for (a,) in got) == pytest.approx(0.0, abs=1e-6)


# ------------------------------------------------------------------------------------------- summaries of real trees


def best_of_two() -> Episode:
    """A prompt with two replies; the second is continued by a further call, and another agent speaks at the end."""
    ids = np.arange(4, dtype=np.int32)
    runs = [
        Run(ids, ROOT, 0),
        Run(ids[:2], 0, 4, call=0),
        Run(ids[:3], 0, 4, call=1),
        Run(ids[:1], 2, 7),
        Run(ids[:2], 3, 8, call=2),
        Run(ids[:2], 3, 8, call=3),
    ]

    def call(agent: str, prompt: int, run: int, reward: float | None = None) -> Call:
        length = len(runs[run].ids)
        start = runs[run].start
        return Call(
            "c",
            agent,
            "t",
            0,
            prompt,
            start,
            run,
            np.zeros(length, np.float32),
            np.ones(length, np.bool_),
            reward=reward,
        )

    calls = [call("a", 0, 1, reward=-1.0), call("a", 0, 2), call("a", 3, 4), call("b", 3, 5)]
    return Episode("e", "t", EpisodeStatus.COMPLETED, CallTree(runs, calls), Ledger(), "g", reward=1.0)


def test_summary_of_a_tree() -> None:
    summary = summarise(best_of_two())
    assert [call.next for call in summary.calls] == [ROOT, 2, ROOT, ROOT]
    assert [call.leaves for call in summary.calls] == [[0], [2, 3], [2], [3]]
    assert summary.tokens == 9
    assert summary.row_tokens == 12
    assert call_values(summary, CreditSettings()) == [-1.0, 1.0, 1.0, 1.0]
    assert EpisodeSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_multiplicity_has_an_entry_for_each_leaf() -> None:
    summary = summarise(best_of_two())
    credit = compute_credit(
        [[summary, single(0.0)]], CreditSettings(multiplicity=True, estimator=AdvantageEstimator.DR_GRPO)
    )
    assert [len(call.entries) for call in credit.episodes[0].calls] == [1, 2, 1, 1]
    assert {weight for call in credit.episodes[0].calls for _, weight in call.entries} == {1 / 22}


def test_an_episode_without_reward_is_refused() -> None:
    episode = best_of_two()
    episode.reward = None
    with pytest.raises(ValueError, match="no reward"):
        summarise(episode)
