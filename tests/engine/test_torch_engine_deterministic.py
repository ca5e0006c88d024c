"""Deterministic mode: a reply depends on prompt, parameters, seed and weights, to the last bit, and on nothing else."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from ajet.schema.chat import Completion
from support.torch_helpers import ask, ask_all, forward_logprobs, random_prompt, request, stats


def new_engine() -> TorchEngine:
    settings = TorchEngineSettings(max_model_len=512, max_num_seqs=8, deterministic=True)
    return TorchEngine("tiny:qwen2", settings)


def conversation(engine: TorchEngine, seed: int, crowd: bool) -> list[Completion]:
    """Three turns of one conversation, alone or among strangers that come and go."""
    rng, strangers = random.Random(seed), random.Random(seed + 1)
    prompt: list[int] = []
    replies = []

    async def turn(prompt: list[int], index: int) -> Completion:
        ours = request(prompt, seed=index, max_tokens=20, ignore_eos=True)
        others = [request(random_prompt(strangers, strangers.randrange(1, 90)), max_tokens=9) for _ in range(11)]
        tasks = [asyncio.create_task(engine.generate(each)) for each in others[:5]] if crowd else []
        if crowd:
            await asyncio.sleep(0.005)
        tasks.append(asyncio.create_task(engine.generate(ours)))
        tasks += [asyncio.create_task(engine.generate(each)) for each in others[5:]] if crowd else []
        done = await asyncio.gather(*tasks)
        return done[5] if crowd else done[0]

    for index in range(3):
        prompt = prompt + random_prompt(rng, 70)
        reply = asyncio.run(turn(prompt, index))
        prompt = prompt + reply.token_ids
        replies.append(reply)
    return replies


def bits(replies: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(reply.token_ids, reply.logprobs) for reply in replies]


@pytest.fixture(scope="module")
def engines() -> list[TorchEngine]:
    return [new_engine(), new_engine()]


def test_alone_in_a_crowd_and_in_another_engine_are_equal_to_the_last_bit(engines: list[TorchEngine]) -> None:
    first, second = engines
    alone = bits(conversation(first, 1, crowd=False))
    assert bits(conversation(second, 1, crowd=True)) == alone
    assert bits(conversation(first, 1, crowd=True)) == alone  # with everything cached
    asyncio.run(first.load_weights(None, 1))
    assert bits(conversation(first, 1, crowd=False)) == alone  # with nothing cached


def test_whole_chunks_are_still_reused(engines: list[TorchEngine]) -> None:
    prompt = random_prompt(random.Random(9), 200)
    ask(engines[0], prompt, max_tokens=3)
    again = ask(engines[0], prompt, max_tokens=3)
    assert again.cached_prompt_tokens == 192
    assert stats(engines[0])["preemptions"] == 0


def test_it_is_still_exact(engines: list[TorchEngine]) -> None:
    prompt = random_prompt(random.Random(10), 100)
    replies = ask_all(engines[0], [request(prompt, seed=seed, max_tokens=10, ignore_eos=True) for seed in range(12)])
    for reply in replies:
        expected = forward_logprobs(engines[0].model, prompt, reply.token_ids)
        assert reply.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_conversation_that_fills_the_memory_goes_on() -> None:
    """There is no room for its second turn beside its first, which is then dropped, not in the way."""
    rng = random.Random(7)
    roomy = TorchEngineSettings(max_model_len=512, max_num_seqs=2, deterministic=True)
    narrow = replace(roomy, kv_cache_gb=600 * 1024 / 1e9)
    prompt, end = random_prompt(rng, 300), random_prompt(rng, 20)

    def two_turns(settings: TorchEngineSettings) -> list[Completion]:
        engine = TorchEngine("tiny:qwen2", settings)
        first = ask(engine, prompt, seed=1, max_tokens=40, ignore_eos=True)
        second = ask(engine, prompt + first.token_ids + end, seed=2, max_tokens=40, ignore_eos=True)
        asyncio.run(engine.aclose())
        return [first, second]

    assert bits(two_turns(narrow)) == bits(two_turns(roomy))
