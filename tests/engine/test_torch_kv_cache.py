"""Slots for keys and values: side by side in slabs, zero when handed out, bounded, aware of what they share."""

from __future__ import annotations

import random

import torch

from ajet.engine.torch.kv_cache import KV, KVPool, KVShape
from support.torch_helpers import LONGEST, copied, written

SHAPE = KVShape(layers=2, heads=2, key_size=8, value_size=8)


def pool_of(max_tokens: int) -> KVPool:
    return KVPool(SHAPE, torch.float32, torch.device("cpu"), max_tokens)


def test_equal_sizes_lie_side_by_side_and_a_free_slot_is_taken_again_empty() -> None:
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


def test_a_slab_is_freed_with_its_last_slot() -> None:
    pool = pool_of(100_000)
    kvs = [written(pool, 100) for _ in range(70)]
    assert len({id(kv.slab) for kv in kvs}) == 2
    for kv in kvs:
        pool.release(kv)
    assert pool.used_tokens == 0
    assert pool.peak_tokens == 2 * 64 * 128


def test_a_slot_grows_and_keeps_what_it_holds() -> None:
    pool = pool_of(100_000)
    small = written(pool, 100)
    held = small.keys_LHCD[:, :, :70].clone()
    large = pool.grown(small, 129, 70, LONGEST)
    assert large is not None
    assert large.capacity >= 129
    assert torch.equal(large.keys_LHCD[:, :, :70], held)
    assert not large.keys_LHCD[:, :, 70:].any()


def test_when_no_new_slab_fits_a_larger_slot_serves() -> None:
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
        slots = [(id(one.slab), one.slot) for one in held]
        assert len(set(slots)) == len(slots)
    for kv in held:
        pool.release(kv)
    assert pool.used_tokens == 0


def shared(left: KV, right: KV, length: int) -> int:
    """How many tokens the two are known to hold alike."""
    ends = dict(left.shared_until(length))
    return max((min(end, ends[origin]) for origin, end in right.shared_until(length) if origin in ends), default=0)


def held_alike(left: KV, right: KV) -> int:
    """How many they really do."""
    size = min(left.capacity, right.capacity)
    same_C = (left.keys_LHCD[:, :, :size] == right.keys_LHCD[:, :, :size]).all(-1).flatten(0, 1).all(0)
    return int(same_C.long().cumprod(0).sum())


def test_copies_know_what_they_share_with_each_other() -> None:
    pool = pool_of(400_000)
    root = written(pool, 200)
    first, second = copied(pool, 200, root, 100), copied(pool, 200, root, 120)
    third = copied(pool, 200, second, 150)
    assert [shared(root, kv, 200) for kv in (first, second, third)] == [100, 120, 120]
    assert [shared(first, second, 200), shared(second, third, 200), shared(first, third, 200)] == [100, 150, 100]
    assert shared(second, third, 90) == 90
    assert shared(root, written(pool, 200), 200) == 0
    larger = pool.grown(third, 300, 160, LONGEST)
    assert larger is not None
    assert shared(second, larger, 200) == 150


def test_what_is_written_anew_is_shared_no_longer() -> None:
    pool = pool_of(400_000)
    root = written(pool, 200)
    first, second = copied(pool, 200, root, 100), copied(pool, 200, root, 100)
    first.write_from(100)
    assert shared(first, second, 200) == 100
    root.write_from(60)
    assert [shared(root, first, 200), shared(first, second, 200)] == [60, 100]
    first.write_from(0)
    assert [shared(first, second, 200), shared(root, first, 200), shared(root, second, 200)] == [0, 0, 60]


def test_no_history_of_copies_and_writes_makes_anything_known_that_is_not_so() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    pool = pool_of(400_000)
    kvs = [written(pool, 100) for _ in range(6)]
    known = 0
    for _ in range(1500):
        index = rng.randrange(len(kvs))
        kv, length = kvs[index], rng.randrange(100)
        if rng.random() < 0.4:
            kv.write_from(length)
            kv.keys_LHCD[:, :, length : length + rng.randrange(1, 40)].normal_()
        else:
            source = rng.choice([other for other in kvs if other is not kv])
            kvs[index] = copied(pool, 100, source, length)
            pool.release(kv)
        left, right = rng.sample(kvs, 2)
        assert shared(left, right, 100) <= held_alike(left, right)
        known += shared(left, right, 100) > 0
    assert known > 200
