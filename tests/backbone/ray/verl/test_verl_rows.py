"""Episodes become rows, and a batch's credit falls on the tokens that were sampled. Needs no verl."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ajet.backbone.ray.credit import (
    ROWLESS,
    SEGMENTS,
    SUMMARY,
    credit_batch,
    in_order,
    rowless_tag,
    segments_of,
    summary_of,
)
from ajet.backbone.ray.rows import Row, group_rows, rows_of, stand_in, validation_row
from ajet.context_tracker.samples import linear_samples
from ajet.schema.episode import ROOT, Episode, EpisodeGroup, EpisodeStatus
from ajet.trainer.credit import (
    Baseline,
    CreditSettings,
    LossNorm,
    compute_credit,
    estimators,
    summarise,
)
from support.episodes import BRANCHING, LINEAR, make_groups


def samples_of(episode: Episode, *, response: int = 10_000, sharing: Any = "once", most: int = 30) -> Any:
    return linear_samples(
        episode.tree,
        shared_token_loss=sharing,
        max_prompt_length=10_000,
        max_response_length=response,
        max_samples=most,
        episode_id=episode.episode_id,
    )[0]


def batch_rows(groups: list[list[Episode]], **options: Any) -> list[Row]:
    return [
        row
        for group in groups
        for episode in group
        for row in rows_of(episode, samples_of(episode, **options), uid=episode.group_id, step=1)
    ]


def test_a_row_holds_what_the_engine_saw() -> None:
    episode = make_groups(LINEAR)[0][0]
    (row,) = rows_of(episode, samples_of(episode), uid="u", step=7)
    last = episode.tree.calls[2]
    assert row.key == "u_0_0"
    assert row.fields["input_ids"].tolist() == episode.tree.path_ids(last.run).tolist()
    assert row.fields["position_ids"].tolist() == list(range(row.tag["seq_len"]))
    assert int(row.fields["response_mask"].sum()) == episode.tree.trained_tokens
    trained = row.fields["rollout_log_probs"][row.fields["response_mask"].bool()].numpy()
    assert trained == pytest.approx(np.concatenate([call.logprobs[call.mask] for call in episode.tree.calls]))
    assert (row.tag["global_steps"], row.tag["min_global_steps"], row.tag["max_global_steps"]) == (7, 3, 3)


@pytest.mark.parametrize("norm", list(LossNorm))
def test_branches_and_rows_change_no_weight(norm: LossNorm) -> None:
    """The credit that falls on each call's tokens is what credit gives the call, however rows were cut."""
    groups = make_groups(BRANCHING)
    settings = CreditSettings(loss_norm=norm, dr_grpo_length=50.0)
    rows = batch_rows(groups)
    result = credit_batch([row.key for row in rows], [row.tag for row in rows], settings)
    expected = compute_credit([[summarise(episode) for episode in group] for group in groups], settings)
    assert len(rows) > sum(len(group) for group in groups)
    got: dict[tuple[str, int], list[float]] = {}
    for row, advantages, weights in zip(rows, result.advantages, result.weights, strict=True):
        name = f"e{row.key[1]}-{row.key.split('_')[1]}"
        for call, start, end in row.tag[SEGMENTS]:
            got.setdefault((name, call), []).extend((advantages[start:end] * weights[start:end]).tolist())
        assert not weights[row.fields["response_mask"].numpy() == 0].any()
    for episode, credit in zip([e for group in groups for e in group], expected.episodes, strict=True):
        for index, (call, worth) in enumerate(zip(episode.tree.calls, credit.calls, strict=True)):
            (entry,) = worth.entries
            assert got[(episode.episode_id, index)] == pytest.approx([entry[0] * entry[1]] * int(call.mask.sum()))


def test_with_multiplicity_a_token_has_its_rows_entry() -> None:
    groups = make_groups(BRANCHING)
    settings = CreditSettings(multiplicity=True)
    rows = batch_rows(groups, sharing="multiplicity")
    result = credit_batch([row.key for row in rows], [row.tag for row in rows], settings)
    assert all(weights.any() for weights in result.weights)
    total = sum(summarise(e).row_tokens for group in groups for e in group)
    assert sum(int(row.fields["response_mask"].sum()) for row in rows) == total


@pytest.mark.parametrize("response", [6, 9, 14, 20])
@pytest.mark.parametrize("most", [2, 30])
def test_with_multiplicity_cut_and_left_out_rows_keep_their_leaf(response: int, most: int) -> None:
    """A row that ends before its leaf still has the leaf's advantage; a row that was left out has no entry."""
    groups = make_groups(BRANCHING)
    settings = CreditSettings(multiplicity=True, estimator=estimators.DR_GRPO, gamma=0.5, baseline=Baseline.TURN)
    rows, leaves, tokens = [], [], 0
    for episode in [e for group in groups for e in group]:
        samples = samples_of(episode, response=response, sharing="multiplicity", most=most)
        rows += rows_of(episode, samples, uid=episode.group_id, step=1)
        leaves += [(episode.episode_id, sample.leaf) for sample in samples]
        tokens += sum(int(sample.response_mask.sum()) for sample in samples)
    result = credit_batch([row.key for row in rows], [row.tag for row in rows], settings)
    by_id = {episode.episode_id: episode for episode in result.episodes}
    for row, (name, leaf), advantages, weights in zip(rows, leaves, result.advantages, result.weights, strict=True):
        summary = json.loads(row.tag[SUMMARY])
        for call, start, end in row.tag[SEGMENTS]:
            at = summary["calls"][call]["leaves"].index(leaf)
            advantage, weight = by_id[name].calls[call].entries[at]
            assert weight == pytest.approx(1 / tokens)
            assert advantages[start:end] == pytest.approx(advantage)
            assert weights[start:end] == pytest.approx(weight)


def test_episodes_without_rows_count_in_the_baseline() -> None:
    """Three episodes with rewards 1, 0, 0, of which nothing of the last is trained."""
    (group,) = make_groups([ROOT], groups=1)
    for episode, reward in zip(group, (1.0, 0.0, 0.0), strict=True):
        episode.reward = reward
    for call in group[2].tree.calls:
        call.mask[:] = False
    rows = batch_rows([group])
    rows[0].tag[ROWLESS] = rowless_tag(group[2:])
    settings = CreditSettings(estimator=estimators.DR_GRPO)
    result = credit_batch([row.key for row in rows], [row.tag for row in rows], settings)
    got = {episode.episode_id: [call.advantage for call in episode.calls] for episode in result.episodes}
    assert got["e0-0"] == pytest.approx([2 / 3])
    assert got["e0-1"] == pytest.approx([-1 / 3])


@pytest.mark.parametrize("norm", list(LossNorm))
def test_a_group_without_any_row_counts_as_in_the_embedded_trainer(norm: LossNorm) -> None:
    """All of its episodes were masked: Dr. GRPO still divides by them, and the batch's deviation knows them."""
    groups = make_groups(LINEAR, groups=2)
    for episode in groups[1]:
        for call in episode.tree.calls:
            call.mask[:] = False
    settings = CreditSettings(loss_norm=norm, dr_grpo_length=60.0, estimator=estimators.REINFORCE_PLUS_PLUS_BASELINE)
    rows = []
    for group in groups:
        made = EpisodeGroup(group[0].group_id, group[0].task_id, group)
        rows += group_rows(made, [samples_of(episode) for episode in group], step=1)
    result = credit_batch([row.key for row in rows], [row.tag for row in rows], settings)
    expected = compute_credit([[summarise(episode) for episode in group] for group in groups], settings)
    assert {one.episode_id: one.calls for one in result.episodes} == {
        one.episode_id: one.calls for one in expected.episodes
    }
    assert result.trained == [not row.key.startswith("g1") for row in rows] and not all(result.trained)


def test_a_batch_of_groups_without_rows_trains_nothing() -> None:
    (group,) = make_groups(LINEAR, groups=1)
    for episode in group:
        for call in episode.tree.calls:
            call.mask[:] = False
    made = EpisodeGroup("g0", "task0", group)
    (row,) = group_rows(made, [samples_of(episode) for episode in group], step=1)
    result = credit_batch([row.key], [row.tag], CreditSettings())
    assert result.trained == [True] and not result.weights[0].any()
    assert row.fields["response_mask"].any()  # or verl's figures of the step end the run


def test_a_group_that_is_left_out_counts_for_nothing() -> None:
    """Its row only stands for it, so that verl doesn't put another group in its place."""
    (group,) = make_groups(LINEAR, groups=1)
    rows = batch_rows([group])
    settings = CreditSettings()
    alone = credit_batch([row.key for row in rows], [row.tag for row in rows], settings)
    rows.insert(0, stand_in("g9", step=1))
    result = credit_batch([row.key for row in rows], [row.tag for row in rows], settings)
    assert result.trained == [False, *alone.trained]
    assert (result.episodes, result.metrics) == (alone.episodes, alone.metrics)
    for episode in group:
        episode.reward = 1.0
    alike = credit_batch([row.key for row in rows], [rows[0].tag, *(row.tag for row in batch_rows([group]))], settings)
    assert alike.trained == [False, *[True] * len(alone.trained)]
    nothing = credit_batch([rows[0].key], [rows[0].tag], settings)
    assert nothing.trained == [True] and not nothing.weights[0].any() and nothing.metrics["credit/groups"] == 0


def test_rows_are_in_the_order_of_tasks_however_their_groups_ended() -> None:
    rows = batch_rows(make_groups(BRANCHING, groups=2, size=11))
    keys, places = [row.key for row in rows], [int(row.key[1]) for row in rows]
    assert [keys[at] for at in in_order(keys, places)] == keys
    assert [keys[::-1][at] for at in in_order(keys[::-1], places[::-1])] == keys


def test_a_cut_row_is_weighed_by_what_is_left_of_it() -> None:
    episode = make_groups(LINEAR)[0][0]
    samples = samples_of(episode, response=6)
    kept = sum(segment.end - segment.start for sample in samples for segment in segments_of(sample))
    assert summary_of(episode, samples).tokens == kept < episode.tree.trained_tokens


def test_groups_that_teach_nothing_leave_the_batch() -> None:
    groups = make_groups(LINEAR)
    for episode in groups[0]:
        episode.reward = 1.0
    rows = batch_rows(groups)
    result = credit_batch([row.key for row in rows], [row.tag for row in rows], CreditSettings())
    assert [row.key.startswith("g1") for row in rows] == result.trained
    for episode in groups[1]:
        episode.reward = 1.0
    rows = batch_rows(groups)
    result = credit_batch([row.key for row in rows], [row.tag for row in rows], CreditSettings())
    assert all(result.trained)  # verl can't skip a step
    assert not any(weights.any() for weights in result.weights)


def test_a_failed_validation_episode_counts_as_no_success() -> None:
    episode = make_groups(LINEAR)[0][0]
    failed = Episode("f", "t", EpisodeStatus.TIMEOUT, episode.tree, episode.ledger, repeat=2)
    row = validation_row(failed, [], uid="u", step=1)
    assert row.fields["extra_fields"]["reward_extra_info"] == {"acc": 0.0, "true_reward": 0.0, "failed": 1.0}
    good = validation_row(episode, samples_of(episode), uid="u", step=1)
    assert float(good.fields["rm_scores"].sum()) == pytest.approx(episode.reward)
    assert good.fields["extra_fields"]["reward_extra_info"]["acc"] == 1.0
    paid = replace(episode, reward=0.8, is_success=None)
    for threshold, acc in ((0.5, 1.0), (0.9, 0.0)):  # a workflow that returns a reward alone
        row = validation_row(paid, samples_of(paid), uid="u", step=1, threshold=threshold)
        assert row.fields["extra_fields"]["reward_extra_info"]["acc"] == acc
