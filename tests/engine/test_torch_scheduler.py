"""Any schedule gives the logits of a plain forward pass."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from ajet.engine.base import StopRule
from ajet.engine.model_source import ModelSource
from ajet.engine.torch import attention
from ajet.engine.torch import scheduler as scheduler_module
from ajet.engine.torch.kv_cache import KVPool, Sequence
from ajet.engine.torch.runner import Draw, DrawState, Runner
from ajet.engine.torch.scheduler import Job, Scheduler
from ajet.schema.chat import Sampling
from support.hybrids import HYBRIDS, hybrid_model
from support.torch_helpers import forward_logits, random_prompt
from support.windowed_models import WINDOWED, windowed_model

SHARES_NOTHING = ("mistral", "mixtral", "phimoe", "gemma2")
"""No layer of theirs sees everything with plain scores, so none reads a prefix for several sequences at once."""
CASES = [("tiny:qwen2", seed) for seed in range(4)] + [(family, 0) for family in WINDOWED]
CASES += [(family, 0) for family in ("Qwen3.5", "Falcon-H1", "LFM2", "Jamba")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_any_schedule_draws_from_what_the_model_itself_says(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are compared: prompts with common beginnings, little memory, cancellations, new weights in between."""
    monkeypatch.setattr(attention, "PREFIX_TOKENS", 20)  # share whatever can be shared
    monkeypatch.setattr(scheduler_module, "LOOKAHEAD", 16)  # slots grow, and run out
    rng = random.Random(seed)
    if name in HYBRIDS:
        model = hybrid_model(name)
    else:
        model = windowed_model(name, vocab_size=600) if name in WINDOWED else ModelSource.resolve(name).model()
    runner = Runner(model)
    states = runner.kv_shape.state_tokens(runner.dtype)
    pool = KVPool(runner.kv_shape, runner.dtype, runner.device, 1300 + 8 * states)
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
    assert name in HYBRIDS or (shared_reads > 20) == (name not in SHARES_NOTHING)
    assert scheduler.preemptions > 0
    assert version > 0
