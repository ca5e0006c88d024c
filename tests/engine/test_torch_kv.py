"""Places for keys and values: side by side on slabs, zero when handed out, never more than the bound; and what rows
read there, together or one by one."""

from __future__ import annotations

import random

import pytest
import torch
from torch_helpers import LONGEST, written

from ajet.engine.torch.attention import LayerPlan, Part, StepLayout
from ajet.engine.torch.kv_cache import KV, KVPool, KVShape

SHAPE = KVShape(layers=2, heads=2, key_size=8, value_size=8)


def pool_of(max_tokens: int) -> KVPool:
    return KVPool(SHAPE, torch.float32, torch.device("cpu"), max_tokens)


def test_equal_sizes_lie_side_by_side_and_a_free_place_is_taken_again_empty() -> None:
    pool = pool_of(100_000)
    first, second, third = (written(pool, 100) for _ in range(3))
    assert first.slab is second.slab is third.slab
    assert [kv.slot for kv in (first, second, third)] == [0, 1, 2]
    pool.release(second)
    again = pool.allocate(100, LONGEST)
    assert again is not None
    assert (again.slab, again.slot) == (first.slab, 1)
    assert not again.keys_LHCD.any()
    assert not again.values_LHCD.any()
    assert first.keys_LHCD.all()


def test_a_slab_is_given_up_with_its_last_place() -> None:
    pool = pool_of(100_000)
    kvs = [written(pool, 100) for _ in range(70)]
    assert len({id(kv.slab) for kv in kvs}) == 2
    for kv in kvs:
        pool.release(kv)
    assert pool.used_tokens == 0
    assert pool.peak_tokens == 2 * 64 * 128


def test_a_place_grows_and_keeps_what_it_holds() -> None:
    pool = pool_of(100_000)
    small = written(pool, 100)
    held = small.keys_LHCD[:, :, :70].clone()
    large = pool.grown(small, 129, 70, LONGEST)
    assert large is not None
    assert large.capacity >= 129
    assert torch.equal(large.keys_LHCD[:, :, :70], held)
    assert not large.keys_LHCD[:, :, 70:].any()


def test_when_no_new_slab_fits_a_larger_place_serves() -> None:
    pool = pool_of(1024)
    large = [pool.allocate(256, LONGEST) for _ in range(3)]
    assert None not in large
    assert large[0] is not None
    pool.release(large[0])
    kept = [pool.allocate(64, LONGEST) for _ in range(20)]
    assert all(kv.capacity >= 64 for kv in kept if kv is not None)
    assert kept[-1] is None
    assert pool.used_tokens <= 1024


def test_random_use_never_exceeds_the_bound_and_leaves_nothing() -> None:
    rng = random.Random(0)
    pool = pool_of(20_000)
    held: list[KV] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
            continue
        kv = pool.allocate(rng.randrange(1, 2000), LONGEST)
        if kv is not None:
            held.append(kv)
        assert pool.used_tokens <= pool.max_tokens
        places = [(id(one.slab), one.slot) for one in held]
        assert len(set(places)) == len(places)
    for kv in held:
        pool.release(kv)
    assert pool.used_tokens == 0


def readers(plan: LayerPlan) -> list[str]:
    return [type(reader).__name__ for reader in plan.readers]


@pytest.mark.parametrize("window", [None, 20])
def test_rows_read_the_same_together_and_one_by_one(window: int | None) -> None:
    torch.manual_seed(0)
    pool = pool_of(100_000)
    kvs = [written(pool, 100) for _ in range(12)]
    idle = kvs.pop(5)
    idle.keys_LHCD.fill_(float("nan"))  # what an idle neighbour holds touches nobody
    contexts = [60, 75, 61, 90, 60, 77, 64, 80, 99, 60, 63]
    parts = [Part(kv, context, 1) for kv, context in zip(kvs, contexts, strict=True)]
    query, key, value = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    random.Random(1).shuffle(parts)
    together, apart = StepLayout(parts, []), StepLayout(parts, [], apart=True)
    assert readers(together.plain) == ["Batch"]
    assert readers(apart.plain) == readers(apart.sharing) == ["Singles"]
    for layer in range(SHAPE.layers):
        one = together.attend(layer, query, key, value, None, window)
        other = apart.attend(layer, query, key, value, None, window)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_rows_that_would_read_much_for_nothing_stay_apart() -> None:
    pool = pool_of(100_000)
    kvs = [written(pool, 1000) for _ in range(10)]
    far = StepLayout([Part(kvs[0], 900, 1), Part(kvs[9], 900, 1)], [])
    assert readers(far.plain) == ["Singles"]
    near = StepLayout([Part(kvs[0], 900, 1), Part(kvs[1], 900, 1)], [])
    assert readers(near.plain) == ["Batch"]
