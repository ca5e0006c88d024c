"""Worked numbers for each estimator, and the rules that hold for all of them."""

from __future__ import annotations

import json
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.backbone.ray.credit import summary_of
from ajet.config.kinds import ESTIMATORS, load
from ajet.schema.episode import ROOT, Call, CallTree, DropReason, Episode, EpisodeStatus, Fork, Ledger, Outcome, Run
from ajet.trainer.credit import (
    AdvantageEstimator,
    Baseline,
    CallSummary,
    CreditSettings,
    EpisodeSummary,
    LossNorm,
    MiniBatch,
    Overlong,
    ZeroVariance,
    compute_credit,
    earned,
    estimators,
    imitation_credit,
    mini_batches,
    summarise,
    teaches,
)
from ajet.trainer.credit.summary import returns_of

ALL: list[AdvantageEstimator] = [load(ESTIMATORS, name) for name in ESTIMATORS]


def single(reward: float, tokens: int = 10, name: str = "e") -> EpisodeSummary:
    return EpisodeSummary(name, "g", reward, [CallSummary("a", tokens, leaves=[0] if tokens else [])])


def chain(reward: float, tokens: list[int], rewards: list[float | None] | None = None) -> EpisodeSummary:
    own = rewards or [None] * len(tokens)
    last = len(tokens) - 1
    calls = [
        CallSummary(
            "a", n, r, next=i + 1 if i < last else ROOT, previous=i - 1 if i else ROOT, state=f"turn {i}", leaves=[last]
        )
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
    assert [a for (a,) in advantages([group], estimator=estimators.DR_GRPO)] == pytest.approx([2.0, -1.0, -1.0])


def test_rloo_worked() -> None:
    # others of 3 have mean 0; others of a 0 have mean 1.5
    group = [single(3.0), single(0.0), single(0.0)]
    assert [a for (a,) in advantages([group], estimator=estimators.RLOO)] == pytest.approx([3.0, -1.5, -1.5])


def test_reinforce_plus_plus_worked() -> None:
    # over the batch: mean 2, std sqrt(8/5); the groups play no part, not even the one without variance
    groups = [[single(4.0), single(2.0)], [single(0.0), single(2.0)], [single(2.0), single(2.0)]]
    std = sqrt(8 / 5) + 1e-6
    expected = [2 / std, 0.0, -2 / std, 0.0, 0.0, 0.0]
    assert [a for (a,) in advantages(groups, estimator=estimators.REINFORCE_PLUS_PLUS)] == pytest.approx(expected)


@pytest.mark.parametrize(("rewards", "teach_nothing"), [((1.0, 0.0), 0), ((1.0, 1.0), 2)])
def test_compared_over_the_batch_groups_of_one_teach_unless_the_batch_is_alike(
    rewards: tuple[float, float], teach_nothing: int
) -> None:
    groups = [[single(reward)] for reward in rewards]
    found = compute_credit(groups, CreditSettings(estimators.REINFORCE_PLUS_PLUS))
    assert found.metrics["credit/zero_variance_groups"] == found.zero_variance_groups == teach_nothing


def test_an_episode_of_many_calls_weighs_no_more_than_one_of_one() -> None:
    one = advantages([[single(1.0), single(0.0), single(0.0)]])
    many = advantages([[chain(1.0, [3] * 9), single(0.0), chain(0.0, [1, 1])]])
    assert many[0] == pytest.approx([one[0][0]] * 9)
    assert many[2] == pytest.approx([one[2][0]] * 2)


# ------------------------------------------------------------------------------------------------------ returns


def test_gamma_discounts_from_call_to_call() -> None:
    returns = returns_of(chain(8.0, [1, 1, 1]), gamma=0.5)
    assert returns.to_go == [2.0, 4.0, 8.0]
    assert returns.whole == [8.0, 8.0, 8.0]
    assert returns.turn == [0, 1, 2]


def test_rewards_of_calls_add_to_the_outcome_wherever_they_are() -> None:
    first = returns_of(chain(1.0, [1, 1], [0.25, None]), gamma=1.0)
    last = returns_of(chain(1.0, [1, 1], [None, 0.25]), gamma=1.0)
    assert (first.to_go, last.to_go) == ([1.25, 1.0], [1.25, 1.25])
    assert first.whole == last.whole == [1.25, 1.25]


def test_a_replacing_reward_keeps_the_outcome_from_its_call_and_those_before() -> None:
    episode = chain(9.0, [1, 1, 1], [1.0, 4.0, None])
    episode.calls[1].replaces_outcome = True
    assert returns_of(episode, gamma=1.0).to_go == [5.0, 4.0, 9.0]
    assert returns_of(episode, gamma=0.5).to_go == [3.0, 4.0, 9.0]
    assert returns_of(episode, gamma=1.0).whole == [5.0, 5.0, 14.0]


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2)), min_size=2, max_size=6))
def test_what_an_episode_earned_is_what_its_group_is_compared_by(given: list[tuple[float, float, float]]) -> None:
    group = [chain(reward, [3, 5], [first, second]) for reward, first, second in given]
    mean = sum(map(earned, group)) / len(group)
    centred = advantages([group], estimator=estimators.DR_GRPO)
    assert [a for a, _ in centred] == pytest.approx([earned(one) - mean for one in group], abs=1e-6)


def test_what_an_episode_earned_is_its_reward_where_nothing_else_is_given() -> None:
    assert earned(single(0.7)) == earned(chain(0.7, [3, 5, 2])) == 0.7
    assert earned(EpisodeSummary("e", "g", 0.7, [])) == 0.7
    both = pair(1.0, 0.5)
    both.calls[1].tokens = 0
    assert earned(both) == 1.0, "an agent that isn't trained earns for nobody"


def test_a_penalty_is_taken_off_where_it_arose() -> None:
    episode = chain(1.0, [1, 1], [None, 0.5])
    episode.calls[0].penalty = 0.25
    returns = returns_of(episode, gamma=1.0)
    assert returns.to_go == [1.25, 1.5]
    assert returns.whole == [1.25, 1.25]


# ---------------------------------------------------------------------------------------- like compared with like


@pytest.mark.parametrize("estimator", [e for e in ALL if e is not estimators.PASS_AT_K])
@pytest.mark.parametrize("baseline", [Baseline.TURN, Baseline.STATE])
def test_a_constant_reward_teaches_nothing_at_any_discount(estimator: AdvantageEstimator, baseline: Baseline) -> None:
    group = [chain(1.0, [3, 5, 2]) for _ in range(4)]
    options = {"estimator": estimator, "baseline": baseline, "gamma": 0.9, "zero_variance": ZeroVariance.KEEP}
    assert advantages([group], **options) == [[0.0, 0.0, 0.0]] * 4
    assert compute_credit([group], CreditSettings(**options)).zero_variance_groups == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("baseline", list(Baseline))
def test_turn_rewards_that_every_episode_has_teach_nothing(baseline: Baseline) -> None:
    group = [chain(0.0, [1, 1], [1.0, 0.0]) for _ in range(3)]
    assert not teaches(group, CreditSettings(baseline=baseline))
    assert advantages([group], baseline=baseline, zero_variance=ZeroVariance.KEEP) == [[0.0, 0.0]] * 3


def pair(solver: float, critic: float) -> EpisodeSummary:
    calls = [CallSummary("solver", 5, leaves=[0]), CallSummary("critic", 5, leaves=[1])]
    return EpisodeSummary("e", "g", 0.0, calls, {"solver": solver, "critic": critic})


def test_agents_with_constant_but_different_rewards_teach_nothing() -> None:
    group = [pair(1.0, 0.0)] * 3
    assert not teaches(group, CreditSettings())
    assert advantages([group], zero_variance=ZeroVariance.KEEP) == [[0.0, 0.0]] * 3


def test_an_agent_is_compared_with_the_same_agent() -> None:
    group = [pair(10.0, 1.0), pair(12.0, 0.0)]
    assert advantages([group], estimator=estimators.DR_GRPO) == [
        pytest.approx([-1.0, 0.5]),
        pytest.approx([1.0, -0.5]),
    ]


def test_an_agent_without_another_episode_has_advantage_nothing() -> None:
    group = [pair(1.0, 5.0), single(0.0), single(0.0)]
    group[0].calls[0].agent = "a"
    group[0].agent_rewards = {"critic": 5.0, "a": 1.0}
    credit = compute_credit([group], CreditSettings(estimator=estimators.DR_GRPO))
    assert [call.advantage for call in credit.episodes[0].calls] == pytest.approx([2 / 3, 0.0])
    assert credit.metrics["credit/agents_alone"] == 1.0


def test_a_turn_that_one_episode_reached_has_the_advantage_of_its_whole_return() -> None:
    # turn 0: values 2, 1, 1 (mean 4/3); turn 1: 2 and 1 (mean 1.5); turn 2 occurs once: 2 against 2, 1, 1
    group = [chain(2.0, [1, 1, 1]), chain(1.0, [1, 1]), chain(1.0, [1])]
    options = {"estimator": estimators.DR_GRPO, "baseline": Baseline.TURN}
    assert advantages([group], **options) == [
        pytest.approx([2 / 3, 0.5, 2 / 3]),
        pytest.approx([-1 / 3, -0.5]),
        pytest.approx([-1 / 3]),
    ]
    assert compute_credit([group], CreditSettings(**options)).metrics["credit/fallback_calls"] == 1.0  # type: ignore[arg-type]


def test_unequal_lengths_alone_do_not_make_a_lonely_turn_vary() -> None:
    group = [chain(1.0, [1, 1, 1]), chain(1.0, [1])]
    got = advantages([group], baseline=Baseline.TURN, gamma=0.9, estimator=estimators.DR_GRPO)
    assert got[0] == pytest.approx([-0.095, 0.0, 0.0])  # 0.81 against 1 at turn 0; nothing else is discounted


def test_the_state_baseline_adds_what_was_done_in_the_same_state() -> None:
    """Two episodes meet in one room at different turns; its step advantage stands beside the episode's."""
    group = [chain(1.0, [1, 1]), chain(0.0, [1, 1, 1])]
    for episode, states in zip(group, (("a", "b"), ("c", "d", "b")), strict=True):
        for call, state in zip(episode.calls, states, strict=True):
            call.state = state
    options = {"estimator": estimators.DR_GRPO, "baseline": Baseline.STATE, "state_weight": 0.5}
    got = advantages([group], **options)
    assert got == [pytest.approx([0.5, 0.75]), pytest.approx([-0.5, -0.5, -0.75])]


def test_an_episode_stands_with_its_alternatives_in_equal_shares() -> None:
    # two replies to one prompt, worth 2 and 0; the other episode 0: mean 0.5, variance mean(2.25, 0.25) + 0.25
    both = EpisodeSummary("e", "g", 0.0, [CallSummary("a", 1, 2.0, leaves=[0]), CallSummary("a", 1, 0.0, leaves=[1])])
    std = sqrt(1.5) + 1e-6
    got = advantages([[both, single(0.0)]])
    assert got[0] == pytest.approx([1.5 / std, -0.5 / std])
    assert got[1] == pytest.approx([-0.5 / std])


def test_zero_variance_groups() -> None:
    groups = [[single(1.0), single(1.0)], [single(1.0), single(0.0)]]
    skip = compute_credit(groups, CreditSettings())
    assert skip.zero_variance_groups == 1
    assert [episode.trained for episode in skip.episodes] == [False, False, True, True]
    assert [call.weight for episode in skip.episodes for call in episode.calls] == [0.0, 0.0, 1 / 20, 1 / 20]
    keep = compute_credit(groups, CreditSettings(zero_variance=ZeroVariance.KEEP))
    assert [call.weight for episode in keep.episodes for call in episode.calls] == [1 / 40] * 4
    assert keep.episodes[0].calls[0].advantage == 0.0


def test_a_group_without_trained_tokens_is_not_one_of_equal_rewards() -> None:
    groups = [[single(1.0, tokens=0), single(0.0, tokens=0)], [single(1.0), single(1.0)]]
    found = compute_credit(groups, CreditSettings())
    assert (found.zero_variance_groups, found.metrics["credit/zero_variance_groups"]) == (1, 1.0)
    assert not any(episode.trained for episode in found.episodes)


def test_a_failed_attempt_without_trained_tokens_still_counts_in_the_statistics() -> None:
    group = [single(1.0), single(0.0, tokens=0)]
    assert advantages([group], estimator=estimators.DR_GRPO)[0] == [0.5]


def test_norms_worked() -> None:
    group = [single(1.0, 10), chain(0.0, [10, 20])]

    def weights(norm: LossNorm) -> list[float]:
        credit = compute_credit([group], CreditSettings(loss_norm=norm, dr_grpo_length=100))
        return [call.weight for episode in credit.episodes for call in episode.calls]

    assert weights(LossNorm.TOKEN_MEAN) == pytest.approx([1 / 40] * 3)
    assert weights(LossNorm.SEQUENCE_MEAN) == pytest.approx([1 / 20, 1 / 60, 1 / 60])
    assert weights(LossNorm.DR_GRPO) == pytest.approx([1 / 200] * 3)


def test_skipped_groups_stay_in_the_denominator_of_dr_grpo() -> None:
    groups = [[single(1.0), single(1.0), single(1.0)], [single(1.0), single(0.0)]]
    credit = compute_credit(groups, CreditSettings(loss_norm=LossNorm.DR_GRPO, dr_grpo_length=100))
    assert [call.weight for episode in credit.episodes for call in episode.calls] == [0, 0, 0, 1 / 500, 1 / 500]


def test_a_part_of_a_batch_weighs_as_a_batch_of_its_own() -> None:
    tokens = [10, 30, 100]
    for norm in LossNorm:
        parts = mini_batches(tokens, 2, norm, (0, 3))
        assert sorted(index for part in parts for index in part.episodes) == [0, 1, 2]
        for part in parts:
            share = sum(tokens[index] for index in part.episodes) / 140
            expected = share if norm is LossNorm.TOKEN_MEAN else len(part.episodes) / 3
            assert part.scale == pytest.approx(1 / expected)
    assert mini_batches(tokens, 1, LossNorm.TOKEN_MEAN, (0, 3)) == [MiniBatch([0, 1, 2], 1.0)]
    assert [part.episodes for part in mini_batches([7], 4, LossNorm.DR_GRPO, (0, 0))] == [[0]]
    assert len(mini_batches(tokens, 9, LossNorm.DR_GRPO, (0, 0))) == 3
    drawn = {tuple(mini_batches(tokens, 2, LossNorm.DR_GRPO, (0, update))[0].episodes) for update in range(9)}
    assert len(drawn) > 2


def test_what_was_cut_by_its_length_is_compared_but_not_trained() -> None:
    group = [single(1.0, 10), single(1.0, 10), single(0.0, 100)]
    group[2].cut = True
    options = {"mask_overlong": True, "estimator": estimators.DR_GRPO}
    credit = compute_credit([group], CreditSettings(**options))  # type: ignore[arg-type]
    assert [call.entries for episode in credit.episodes for call in episode.calls] == [
        [(pytest.approx(1 / 3), 1 / 20)],
        [(pytest.approx(1 / 3), 1 / 20)],
        [],
    ]
    assert [episode.trained for episode in credit.episodes] == [True, True, False]
    assert credit.metrics["credit/masked_overlong"] == 1.0


@pytest.mark.parametrize("norm", list(LossNorm))
def test_what_was_cut_by_its_length_is_not_imitated(norm: LossNorm) -> None:
    """Nor trained by a teacher alone: `overlong.mask` means the same without a baseline."""
    group = [single(1.0, 10), single(1.0, 30), single(1.0, 100)]
    group[2].cut = True
    credit = imitation_credit([group], CreditSettings(loss_norm=norm, mask_overlong=True, dr_grpo_length=50.0))
    weights = [call.weight for episode in credit.episodes for call in episode.calls]
    expected = {
        LossNorm.TOKEN_MEAN: [1 / 40, 1 / 40, 0.0],
        LossNorm.SEQUENCE_MEAN: [1 / 20, 1 / 60, 0.0],
        LossNorm.DR_GRPO: [1 / 150, 1 / 150, 0.0],
    }
    assert weights == pytest.approx(expected[norm])
    assert [episode.trained for episode in credit.episodes] == [True, True, False]
    assert credit.metrics["credit/masked_overlong"] == 1.0


def test_overlong_reward() -> None:
    overlong = Overlong(limit=100, buffer=20, penalty=1.0)
    assert [overlong.shaped(1.0, n) for n in (80, 90, 100, 500)] == [1.0, 0.5, 0.0, 0.0]
    assert returns_of(single(1.0, 90), 1.0, overlong).to_go == [0.5]


def test_a_masked_episode_is_compared_with_its_overlong_penalty() -> None:
    """Whichever key masks it, and whether or not its row was cut."""

    def played(tokens: int, drop: DropReason | None = None) -> Episode:
        runs = [Run(np.zeros(2, np.int32), ROOT, 0), Run(np.zeros(tokens, np.int32), 0, 2, call=0)]
        mask = np.full(tokens, drop is None)
        call = Call("c", "a", "t", 0, 0, 2, 1, np.zeros(tokens, np.float32), mask, drop=drop)
        return Episode("e", "t", EpisodeStatus.TRUNCATED, CallTree(runs, [call]), Ledger(), reward=1.0)

    group = [played(10), played(10), played(100, "failure_reward")]
    rowless = [summarise(group[0]), summarise(group[1]), summary_of(group[2], [])]
    cut_row = [summarise(group[0]), summarise(group[1]), summary_of(played(100), [])]
    cut = [single(1.0, 10), single(1.0, 10), single(1.0, 100)]
    cut[2].cut = True
    keys: dict[str, Any] = {"overlong": Overlong(limit=100, buffer=20), "estimator": estimators.DR_GRPO}
    expected = [[pytest.approx(1 / 3)], [pytest.approx(1 / 3)], [0.0]]
    for summaries in ([summarise(each) for each in group], rowless, cut_row):
        assert advantages([summaries], **keys) == expected
    assert advantages([cut], **keys, mask_overlong=True) == expected
    assert summarise(played(100, "abandoned")).length == 0


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.sampled_from(ALL))
@settings(max_examples=50, deadline=None)
def test_advantages_sum_to_nothing(rewards: list[float], estimator: AdvantageEstimator) -> None:
    got = advantages([[single(r) for r in rewards]], estimator=estimator, zero_variance=ZeroVariance.KEEP, pass_k=2)
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
    assert [call.previous for call in summary.calls] == [ROOT, ROOT, 1, ROOT]
    assert returns_of(summary, 1.0).whole == [0.0, 1.0, 1.0, 1.0]
    assert EpisodeSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_a_retry_is_what_the_call_before_it_led_to() -> None:
    """One call, then two replies to the next prompt, of which the second is built upon."""
    episode = best_of_two()
    tree = episode.tree
    tree.calls[0].agent = "b"  # the first prompt's other reply is another agent's now
    tree.calls[3].agent = "a"  # and the last prompt's two replies are the same agent's
    summary = summarise(episode)
    assert [call.next for call in summary.calls] == [ROOT, 3, ROOT, ROOT]
    assert [call.previous for call in summary.calls] == [ROOT, ROOT, 1, 1]


def test_the_reply_that_was_built_upon_is_known_where_the_template_writes_it_anew() -> None:
    """The first of two replies has the reward; the next prompt holds it, is no continuation of it, and is retried."""
    episode = best_of_two()
    tree = episode.tree
    tree.calls[0].reward, tree.calls[3].agent = 0.5, "a"
    tree.runs[3] = Run(np.arange(9, dtype=np.int32), ROOT, 0)
    for call in tree.calls[2:]:
        call.prompt_tokens = tree.runs[call.run].start = 9
    tree.calls[2].fork = Fork("template_not_stable", 0)
    summary = summarise(episode)
    assert [call.previous for call in summary.calls] == [ROOT, ROOT, 0, 0]
    assert [call.next for call in summary.calls] == [3, ROOT, ROOT, ROOT]
    assert returns_of(summary, 1.0).whole == [1.5, 1.0, 1.5, 1.5]
    tree.calls[2].fork = Fork("message_changed", 0)  # it holds neither
    assert [call.previous for call in summarise(episode).calls] == [ROOT, ROOT, 1, 1]


def test_calls_that_were_shown_the_same_are_in_the_same_state() -> None:
    episode = best_of_two()
    system = {"role": "system", "content": "Explore."}
    door = {"role": "tool", "content": "A door.", "tool_call_id": "x1"}
    calls = episode.tree.calls
    calls[0].new_messages = [system, door]
    calls[1].new_messages = [door]
    calls[2].new_messages = [system, {"role": "assistant", "content": "East."}, {**door, "tool_call_id": "x2"}]
    calls[3].new_messages = [{"role": "tool", "content": "A wall."}]
    states = [call.state for call in summarise(episode).calls]
    assert states[1] == states[2]
    assert len(set(states)) == 3


def test_the_summary_knows_success_and_what_was_cut() -> None:
    episode = best_of_two()
    episode.is_success, episode.outcomes = True, (Outcome.LENGTH,)
    summary = summarise(episode)
    assert (summary.success, summary.cut) == (True, True)


def test_multiplicity_has_an_entry_for_each_leaf() -> None:
    summary = summarise(best_of_two())
    credit = compute_credit([[summary, single(0.0)]], CreditSettings(multiplicity=True, estimator=estimators.DR_GRPO))
    assert [len(call.entries) for call in credit.episodes[0].calls] == [1, 2, 1, 1]
    assert {weight for call in credit.episodes[0].calls for _, weight in call.entries} == {1 / 22}


def test_an_episode_without_reward_is_refused() -> None:
    episode = best_of_two()
    episode.reward = None
    with pytest.raises(ValueError, match="no reward"):
        summarise(episode)
