"""A pack holds every needed token once, knows who sees whom, and loses no edge, in any layout and under any budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.schema.episode import ROOT, Call, CallTree, Run
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit
from ajet.trainer.pack import Layout, Pack, items_of, make_packs
from support.random_batches import random_batch


def seen_by(pack: Pack, place: int) -> list[int]:
    """The tokens that the token at `place` sees, from `ends`."""
    return [int(pack.ids[j]) for j in range(place + 1) if place < pack.ends[j]]


def matrix_of_blocks(pack: Pack) -> np.ndarray:
    sees = np.zeros((len(pack), len(pack)), np.int64)
    for start, end in pack.blocks.causal:
        sees[start:end, start:end] += np.tril(np.ones((end - start, end - start), np.int64))
    for query_start, query_end, key_start, key_end in pack.blocks.full:
        sees[query_start:query_end, key_start:key_end] += 1
    return sees


@given(st.integers(0, 10_000), st.sampled_from(list(Layout)), st.sampled_from([None, 30, 60]))
@settings(max_examples=60, deadline=None)
def test_every_edge_is_predicted_from_exactly_its_prompt(seed: int, layout: Layout, budget: int | None) -> None:
    episodes, _, credit = random_batch(seed)
    items = items_of([(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)])
    seen_edges = set()
    for pack in make_packs(items, layout, budget):
        assert (pack.positions == [len(seen_by(pack, i)) - 1 for i in range(len(pack))]).all()
        edges = pack.edges
        for index in range(len(edges)):
            tree = episodes[edges.episode[index]].tree
            call, token = int(edges.call[index]), int(edges.token[index])
            reply = tree.runs[tree.calls[call].run].ids
            context = np.concatenate([tree.prompt_ids(call), reply[:token]])
            assert seen_by(pack, int(edges.position[index])) == context.tolist()
            assert edges.target[index] == reply[token]
            seen_edges.add((int(edges.episode[index]), call, token))
        # the blocks say the same as `ends`, and no pair is computed twice
        places = np.arange(len(pack))
        from_ends = (places[None, :] <= places[:, None]) & (places[:, None] < pack.ends[None, :])
        assert (matrix_of_blocks(pack) == from_ends).all()
    expected = {
        (item.episode, item.call, int(token))
        for item in items
        for token in np.flatnonzero(item.tree.calls[item.call].mask)
    }
    assert seen_edges == expected


def test_shared_context_is_there_once_also_across_episodes() -> None:
    episodes, _, credit = random_batch(3, groups=3, repeat=4)
    items = items_of([(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)])
    (pack,) = make_packs(items)
    assert len(pack.rows) == 1
    (flat,) = make_packs(items, Layout.FLAT)
    (merged,) = make_packs(items, Layout.MERGED)
    assert len(flat.rows) == len(items)
    assert len(pack) < len(merged) <= len(flat) == flat.unshared_tokens == pack.unshared_tokens


def test_a_budget_splits_a_tree_and_repeats_only_ancestors() -> None:
    episodes, _, credit = random_batch(4, groups=1, repeat=3, calls=8)
    items = items_of([(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)])
    packs = make_packs(items, budget=40)
    assert len(packs) > 1
    assert sum(len(pack.edges) for pack in packs) == len(make_packs(items)[0].edges)
    longest = max(item.row_tokens for item in items)
    assert all(len(pack) <= max(40, longest) for pack in packs)


def test_a_prompt_may_end_within_a_run() -> None:
    ids = np.arange(10, dtype=np.int32)
    first, second = np.array([50, 51], np.int32), np.array([60], np.int32)
    runs = [Run(ids, ROOT, 0), Run(first, 0, 6, call=0), Run(second, 0, 10, call=1)]

    def call(prompt_tokens: int, run: int) -> Call:
        count = len(runs[run].ids)
        return Call("c", "a", "t", 0, 0, prompt_tokens, run, np.zeros(count, np.float32), np.ones(count, np.bool_))

    tree = CallTree(runs, [call(6, 1), call(10, 2)])
    credit = EpisodeCredit("e", [CallCredit([(1.0, 1.0)]), CallCredit([(1.0, 1.0)])])
    (pack,) = make_packs(items_of([(tree, credit)]))
    assert len(pack) == 10 + 1  # the replies' last tokens predict nothing
    assert {int(t): seen_by(pack, int(p)) for p, t in zip(pack.edges.position, pack.edges.target, strict=True)} == {
        50: list(range(6)),
        51: [*range(6), 50],
        60: list(range(10)),
    }


@pytest.mark.parametrize("layout", list(Layout))
def test_a_chain_is_one_causal_row(layout: Layout) -> None:
    runs, calls, start = [], [], 0
    for turn in range(3):
        runs.append(Run(np.arange(4, dtype=np.int32) + turn, len(runs) - 1, start))
        start += 4
        runs.append(Run(np.arange(3, dtype=np.int32) + turn, len(runs) - 1, start, call=turn))
        mask = np.ones(3, np.bool_)
        calls.append(Call("c", "a", "t", turn, len(runs) - 2, start, len(runs) - 1, np.zeros(3, np.float32), mask))
        start += 3
    credit = EpisodeCredit("e", [CallCredit([(1.0, 1.0)])] * 3)
    (pack,) = make_packs(items_of([(CallTree(runs, calls), credit)]), layout)
    if layout is Layout.FLAT:
        assert len(pack.blocks.causal) == 3
    else:
        assert (pack.blocks.causal, pack.blocks.full) == ([(0, 20)], [])
