"""Parts read the same together and apart, and what they have in common is read once where that pays."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from ajet.engine.attention_rules import ALL, Sight, Visibility
from ajet.engine.torch import attention, readers
from ajet.engine.torch.attention import LayerPlan, StepLayout
from ajet.engine.torch.kv_cache import KVPool, KVShape
from ajet.engine.torch.readers import PassPart
from support.torch_helpers import copied, written

SHAPE = KVShape(layers=2, heads=2, key_size=8, value_size=8)


def pool_of(dtype: torch.dtype = torch.float32, heads: int = 2) -> KVPool:
    return KVPool(SHAPE._replace(heads=heads), dtype, torch.device("cpu"), 400_000)


def kinds(plan: LayerPlan) -> list[str]:
    return sorted(type(reader).__name__ for reader in plan.readers)


def step_of(
    pool: KVPool, prefix: int, rows: int, counts: list[int], seed: int = 0
) -> tuple[list[PassPart], list[PassPart]]:
    """Rows and chunks, all with the same first `prefix` tokens, and of different lengths."""
    rng = random.Random(seed)
    root = written(pool, prefix + 100)
    kvs = [root] + [copied(pool, prefix + 100, root, prefix) for _ in range(rows + len(counts) - 1)]
    rng.shuffle(kvs)
    contexts = [prefix + rng.randrange(30) for _ in kvs]
    parts = [PassPart(kv, context, 1) for kv, context in zip(kvs, contexts, strict=True)]
    chunks = [replace(part, count=count) for part, count in zip(parts[rows:], counts, strict=True)]
    return parts[:rows], chunks


def windows(window: int | None) -> list[Visibility]:
    return [ALL if window is None else Visibility(Sight.WINDOW, window)] * SHAPE.layers


def read(layout: StepLayout, dtype: torch.dtype, heads: int, groups: int, **options: Any) -> torch.Tensor:
    """What layer 1 reads, for queries, keys and values that depend on the token's number alone."""
    tokens = sum(member.part.count for member in layout.members)
    torch.manual_seed(1)
    query, key, value = (
        torch.randn(tokens, number, 8).transpose(0, 1)[None].to(dtype) for number in (heads * groups, heads, heads)
    )
    return layout.attend(1, query, key, value, layout.rule(1, None, options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("window", [None, 5000, 40])
def test_a_shared_prefix_is_read_as_by_each_alone(
    dtype: torch.dtype, heads: int, groups: int, window: int | None
) -> None:
    torch.manual_seed(0)
    rows, chunks = step_of(pool_of(dtype, heads), 300, 20, [2, 3, 12, 15, 9, 40, 64, 65])
    seen = windows(window)
    together, apart = StepLayout(rows, chunks, seen), StepLayout(rows, chunks, seen, apart=True)
    one, other = (read(layout, dtype, heads, groups) for layout in (together, apart))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(one, other, **tolerance)
    assert ("sharing" in together.__dict__) == (window != 40)  # one that cuts into the prefix is read the plain way
    assert [len(together.sharing.prefixes), len(apart.sharing.prefixes)] == [1, 0]
    assert together.sharing.prefixes[0].keys[0].shape[2] == 288  # whole vectors of 300 tokens


@pytest.mark.parametrize("window", [None, 7, 100])
def test_short_chunks_read_in_one_call_what_each_reads_alone(window: int | None) -> None:
    torch.manual_seed(0)
    pool = pool_of()
    kvs = [written(pool, 150) for _ in range(13)]
    kvs.pop(6).keys_LHCD.fill_(float("nan"))  # what an idle neighbour holds touches nobody
    rng = random.Random(2)
    chunks = [PassPart(kv, rng.randrange(40, 60), rng.randrange(15, 30)) for kv in kvs]
    rng.shuffle(chunks)
    seen = windows(window)
    together, apart = StepLayout([], chunks, seen), StepLayout([], chunks, seen, apart=True)
    assert kinds(together.plain) == ["PassBatch"]
    assert kinds(apart.plain) == ["LongChunk"] * 12
    one, other = (read(layout, torch.float32, 2, 2) for layout in (together, apart))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_prefix_is_shared_only_where_that_pays() -> None:
    assert StepLayout(*step_of(pool_of(), 170, 64, [])).sharing.prefixes
    for prefix, rows, counts in [(170, 8, []), (10, 64, []), (1000, 1, []), (1000, 1, [65] * 10)]:
        layout = StepLayout(*step_of(pool_of(), prefix, rows, counts))
        assert layout.sharing is layout.plain


def test_long_prefixes_of_groups_win_over_a_short_one_of_all() -> None:
    pool = pool_of()
    root = written(pool, 1200)
    parts = []
    for _ in range(4):
        first = copied(pool, 1200, root, 64)
        group = [first, *(copied(pool, 1200, first, 1000) for _ in range(7))]
        parts += [PassPart(kv, 1020, 1) for kv in group]
    layout = StepLayout(parts, [])
    assert [prefix.keys[0].shape[2] for prefix in layout.sharing.prefixes] == [992] * 4
    torch.testing.assert_close(
        read(layout, torch.float32, 2, 2),
        read(StepLayout(parts, [], apart=True), torch.float32, 2, 2),
        rtol=1e-5,
        atol=1e-6,
    )


def test_without_the_operator_all_is_read_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "can_join", lambda query, value: False)
    torch.manual_seed(0)
    rows, chunks = step_of(pool_of(), 300, 20, [5, 9])
    layout = StepLayout(rows, chunks)
    one = read(layout, torch.float32, 2, 2)
    assert "sharing" not in layout.__dict__
    torch.testing.assert_close(one, read(StepLayout(rows, chunks, apart=True), torch.float32, 2, 2))


@pytest.mark.parametrize("window", [None, 20])
def test_rows_read_the_same_together_and_one_by_one(window: int | None) -> None:
    torch.manual_seed(0)
    pool = pool_of()
    kvs = [written(pool, 100) for _ in range(12)]
    idle = kvs.pop(5)
    idle.keys_LHCD.fill_(float("nan"))  # what an idle neighbour holds touches nobody
    contexts = [60, 75, 61, 90, 60, 77, 64, 80, 99, 60, 63]
    parts = [PassPart(kv, context, 1) for kv, context in zip(kvs, contexts, strict=True)]
    query, key, value = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    random.Random(1).shuffle(parts)
    seen = windows(window)
    together, apart = StepLayout(parts, [], seen), StepLayout(parts, [], seen, apart=True)
    assert kinds(together.plain) == ["PassBatch"]
    assert kinds(apart.plain) == kinds(apart.sharing) == ["Singles"]
    for layer in range(SHAPE.layers):
        one = together.attend(layer, query, key, value, together.rule(layer, None, {}))
        other = apart.attend(layer, query, key, value, apart.rule(layer, None, {}))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_rows_that_would_read_much_for_nothing_stay_apart() -> None:
    pool = pool_of()
    kvs = [written(pool, 1000) for _ in range(10)]
    far = StepLayout([PassPart(kvs[0], 900, 1), PassPart(kvs[9], 900, 1)], [])
    assert kinds(far.plain) == ["Singles"]
    near = StepLayout([PassPart(kvs[0], 900, 1), PassPart(kvs[1], 900, 1)], [])
    assert kinds(near.plain) == ["PassBatch"]


def written_out(
    layout: StepLayout, query: torch.Tensor, value: torch.Tensor, seen: Visibility, cap: float | None, sinks: Any
) -> torch.Tensor:
    """Every token by itself, by the formula, from the keys and values that lie in its slot."""
    read = []
    for part, start in layout.members:
        keys, values = part.kv.keys_LHCD[1], part.kv.values_LHCD[1]
        for index in range(part.count):
            position = part.context + index
            first = max(0, seen.first(position))
            for head in range(query.shape[1]):
                group = head * keys.shape[0] // query.shape[1]
                scores = keys[group, first : position + 1] @ query[0, head, start + index] * 8**-0.5
                if cap is not None:
                    scores = cap * (scores / cap).tanh()
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].exp())
                read.append(weights @ values[group, first : position + 1] / total)
    return torch.stack(read).view(1, query.shape[2], query.shape[1], value.shape[-1])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seen", [ALL, Visibility(Sight.WINDOW, 40), Visibility(Sight.CHUNK, 128)])
@pytest.mark.parametrize(("cap", "with_sinks"), [(None, False), (1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("kernel", [True, False])
def test_every_rule_is_read_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, apart: bool, seen: Visibility, cap: float | None, with_sinks: bool, kernel: bool
) -> None:
    if not kernel:
        for module in (attention, readers):
            monkeypatch.setattr(module, "can_join", lambda query, value: False)
    torch.manual_seed(0)
    rows, chunks = step_of(pool_of(), 200, 12, [2, 12, 40, 65])
    layout = StepLayout(rows, chunks, [seen] * SHAPE.layers, apart=apart)
    tokens = sum(member.part.count for member in layout.members)
    query, key, value = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8)
    sinks = torch.randn(4) if with_sinks else None
    got = layout.attend(1, query, key, value, layout.rule(1, None, {"softcap": cap, "s_aux": sinks}))
    torch.testing.assert_close(got, written_out(layout, query, value, seen, cap, sinks), rtol=1e-4, atol=1e-5)
    assert bool(layout.sharing.prefixes) == (not apart)
