"""What sequences hold alike is known exactly, read once where that pays, and gives what reading it apart gives."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from torch_helpers import LONGEST, forward_logits, random_prompt, written

from ajet.engine.model_source import ModelSource
from ajet.engine.sampling_rules import StopRule
from ajet.engine.torch import attention
from ajet.engine.torch import scheduler as scheduler_module
from ajet.engine.torch.attention import LayerPlan, Part, StepLayout
from ajet.engine.torch.kv_cache import KV, KVPool, KVShape, Sequence
from ajet.engine.torch.runner import Runner
from ajet.engine.torch.sampler import Draw, DrawState
from ajet.engine.torch.scheduler import Job, Scheduler
from ajet.schema.generation import Sampling

SHAPE = KVShape(layers=2, heads=2, key_size=8, value_size=8)


def pool_of(dtype: torch.dtype = torch.float32, heads: int = 2) -> KVPool:
    return KVPool(SHAPE._replace(heads=heads), dtype, torch.device("cpu"), 400_000)


def copied(pool: KVPool, tokens: int, source: KV, length: int) -> KV:
    """`length` tokens of a source, and its own from there on."""
    kv = written(pool, tokens)
    kv.copy_prefix(source, length)
    return kv


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
    pool = pool_of()
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
    pool = pool_of()
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
    pool = pool_of()
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


def kinds(plan: LayerPlan) -> list[str]:
    return sorted(type(reader).__name__ for reader in plan.readers)


def step_of(pool: KVPool, prefix: int, rows: int, counts: list[int], seed: int = 0) -> tuple[list[Part], list[Part]]:
    """Rows and chunks, all with the same first `prefix` tokens, and of different lengths."""
    rng = random.Random(seed)
    root = written(pool, prefix + 100)
    kvs = [root] + [copied(pool, prefix + 100, root, prefix) for _ in range(rows + len(counts) - 1)]
    rng.shuffle(kvs)
    contexts = [prefix + rng.randrange(30) for _ in kvs]
    parts = [Part(kv, context, 1) for kv, context in zip(kvs, contexts, strict=True)]
    chunks = [replace(part, count=count) for part, count in zip(parts[rows:], counts, strict=True)]
    return parts[:rows], chunks


def read(layout: StepLayout, dtype: torch.dtype, heads: int, groups: int, window: int | None) -> torch.Tensor:
    """What layer 1 reads, for queries, keys and values that depend on the token's number alone."""
    tokens = sum(member.part.count for member in layout.members)
    torch.manual_seed(1)
    query, key, value = (
        torch.randn(tokens, number, 8).transpose(0, 1)[None].to(dtype) for number in (heads * groups, heads, heads)
    )
    return layout.attend(1, query, key, value, None, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (1, 4), (2, 3)])
@pytest.mark.parametrize("window", [None, 5000, 40])
def test_a_shared_prefix_is_read_as_by_each_alone(
    dtype: torch.dtype, heads: int, groups: int, window: int | None
) -> None:
    torch.manual_seed(0)
    rows, chunks = step_of(pool_of(dtype, heads), 300, 20, [2, 3, 12, 15, 9, 40, 64, 65])
    together, apart = StepLayout(rows, chunks), StepLayout(rows, chunks, apart=True)
    one, other = (read(layout, dtype, heads, groups, window) for layout in (together, apart))
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
    chunks = [Part(kv, rng.randrange(40, 60), rng.randrange(15, 30)) for kv in kvs]
    rng.shuffle(chunks)
    together, apart = StepLayout([], chunks), StepLayout([], chunks, apart=True)
    assert kinds(together.plain) == ["Batch"]
    assert kinds(apart.plain) == ["LongChunk"] * 12
    one, other = (read(layout, torch.float32, 2, 2, window) for layout in (together, apart))
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
        parts += [Part(kv, 1020, 1) for kv in group]
    layout = StepLayout(parts, [])
    assert [prefix.keys[0].shape[2] for prefix in layout.sharing.prefixes] == [992] * 4
    torch.testing.assert_close(
        read(layout, torch.float32, 2, 2, None),
        read(StepLayout(parts, [], apart=True), torch.float32, 2, 2, None),
        rtol=1e-5,
        atol=1e-6,
    )


def test_without_the_operator_all_is_read_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "can_join", lambda query, value: False)
    torch.manual_seed(0)
    rows, chunks = step_of(pool_of(), 300, 20, [5, 9])
    layout = StepLayout(rows, chunks)
    one = read(layout, torch.float32, 2, 2, None)
    assert "sharing" not in layout.__dict__
    torch.testing.assert_close(one, read(StepLayout(rows, chunks, apart=True), torch.float32, 2, 2, None))


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_draws_from_what_the_model_itself_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are compared: prompts with common beginnings, little memory, cancellations, new weights in between."""
    monkeypatch.setattr(attention, "PREFIX_TOKENS", 20)  # share whatever can be shared
    monkeypatch.setattr(scheduler_module, "LOOKAHEAD", 16)  # places grow, and run out
    rng = random.Random(seed)
    model = ModelSource.resolve("tiny:qwen2").model()
    runner = Runner(model)
    pool = KVPool(runner.kv_shape, runner.dtype, runner.device, 1300)
    scheduler = Scheduler(pool, max_model_len=400, max_running=16, tokens_per_step=100)
    stems = [random_prompt(rng, length) for length in (40, 90)]
    stems.append(stems[1] + random_prompt(rng, 30))
    shared_reads, version = 0, 0
    ended: deque[list[int]] = deque(maxlen=4)

    def submit() -> None:
        begin = rng.choice([*stems, *ended])
        prompt = begin[: rng.randrange(len(begin) // 2, len(begin) + 1)] + random_prompt(rng, rng.randrange(1, 20))
        draw_state = DrawState(Sampling(), prompt, 0, random.Random(0))
        rule = StopRule.of(Sampling(max_tokens=rng.randrange(1, 60), ignore_eos=True), frozenset(), 60)
        scheduler.submit(Job(draw_state, rule, None, Sequence(list(prompt))))

    real = attention.shared_prefixes

    def counting(members: list[attention.Member]) -> list[tuple[int, list[attention.Member]]]:
        nonlocal shared_reads
        found = real(members)
        shared_reads += len(found)
        return found

    monkeypatch.setattr(attention, "shared_prefixes", counting)
    for _ in range(150):
        if len(scheduler.waiting) < 4:
            submit()
        if rng.random() < 0.03:
            version += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.02 * rng.random())
            scheduler.start_version(version)
        if rng.random() < 0.05 and scheduler.running:
            scheduler.release(rng.choice(scheduler.running))
        step = scheduler.plan()
        logits = runner.forward([work for _, work in step.rows], [work for _, work in step.chunks])
        scheduler.computed(step)
        for job, row in zip(step.drawing, logits, strict=True):
            if rng.random() < 0.2:
                expected = forward_logits(model, job.sequence.tokens)[-1]
                torch.testing.assert_close(row, expected, rtol=1e-4, atol=2e-4)
            tokens = list(job.sequence.tokens)
            if scheduler.drawn(job, Draw(rng.randrange(500), 0.0, None), lambda ids: "") is not None:
                ended.append(tokens)
    assert shared_reads > 20
    assert scheduler.preemptions > 0
    assert version > 0
