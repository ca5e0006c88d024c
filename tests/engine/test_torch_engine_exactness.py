"""The embedded engine computes what the model computes, whoever else is in the batch and whatever is cached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch

from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from support.torch_helpers import (
    NEAR_TIE,
    ask,
    ask_all,
    forward_logits,
    forward_logprobs,
    random_prompt,
    request,
    stats,
)

FAMILIES = ["qwen2", "qwen3", "llama"]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[TorchEngine]:
    engine = TorchEngine(f"tiny:{request.param}", TorchEngineSettings(max_model_len=1024, tokens_per_step=128))
    asyncio.run(engine.ready())
    yield engine
    asyncio.run(engine.aclose())


def generated(engine: TorchEngine, prompt: list[int], count: int) -> list[int]:
    """What `transformers.generate` makes of a prompt, greedily."""
    model = engine.model
    model.generation_config.eos_token_id = None
    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, use_cache=True)
    return output[0, len(prompt) :].tolist()


def assert_same_or_near_tie(engine: TorchEngine, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    if ours == theirs:
        return
    first = next(index for index in range(len(theirs)) if ours[index] != theirs[index])
    top = forward_logits(engine.model, prompt + theirs[:first])[-1].topk(2).values
    assert float(top[0] - top[1]) < NEAR_TIE


def test_greedy_replies_equal_generate_in_any_mix_of_requests(engine: TorchEngine) -> None:
    rng = random.Random(1)
    prompts = [random_prompt(rng, rng.choice([1, 3, 20, 64, 150, 400])) for _ in range(12)]
    prompts += [prompts[0], prompts[3] + [7, 8], prompts[5][:90]]
    lengths = [rng.randrange(1, 40) for _ in prompts]

    async def staggered() -> list[list[int]]:
        tasks = []
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            sampling = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}
            tasks.append(asyncio.create_task(engine.generate(request(prompt, **sampling))))
            if index % 4 == 0:
                await asyncio.sleep(0.01)
            if index % 5 == 0:  # others come and go
                tasks.append(asyncio.create_task(engine.generate(request(prompt, max_tokens=5, temperature=2.0))))
        replies = await asyncio.gather(*tasks)
        return [reply.token_ids for reply in replies]

    replies = asyncio.run(staggered())
    wanted = [reply for index, reply in enumerate(replies) if index not in {1, 7, 13}]
    for prompt, length, reply in zip(prompts, lengths, wanted, strict=True):
        assert_same_or_near_tie(engine, prompt, reply, generated(engine, prompt, length))


def test_logprobs_are_those_of_a_full_forward_pass_at_the_temperature(engine: TorchEngine) -> None:
    rng = random.Random(2)
    asked = [(random_prompt(rng, rng.randrange(2, 200)), temperature) for temperature in (0.0, 0.5, 1.0, 1.7) * 3]
    replies = ask_all(
        engine,
        [
            request(prompt, temperature=temperature, max_tokens=25, top_p=0.9, presence_penalty=0.5, seed=index)
            for index, (prompt, temperature) in enumerate(asked)
        ],
    )
    for (prompt, temperature), reply in zip(asked, replies, strict=True):
        expected = forward_logprobs(engine.model, prompt, reply.token_ids, temperature or 1.0)
        assert reply.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_conversation_computes_only_what_is_new_in_each_turn(engine: TorchEngine) -> None:
    rng = random.Random(3)
    prompt: list[int] = []
    for turn in range(10):
        message = random_prompt(rng, 30)
        before = stats(engine)["computed_prompt_tokens"]
        prompt = prompt + message
        reply = ask(engine, prompt, temperature=1.0, max_tokens=10, seed=turn, ignore_eos=True)
        computed = stats(engine)["computed_prompt_tokens"] - before
        # the last drawn token was never fed to the model: it is new, too
        assert computed == len(message) + (1 if turn else 0)
        assert reply.cached_prompt_tokens == len(prompt) - computed
        assert reply.logprobs == pytest.approx(forward_logprobs(engine.model, prompt, reply.token_ids), abs=1e-4)
        prompt = prompt + reply.token_ids


def test_a_group_of_equal_prompts_is_computed_once(engine: TorchEngine) -> None:
    prompt = random_prompt(random.Random(4), 300)
    before = stats(engine)["computed_prompt_tokens"]
    replies = ask_all(engine, [request(prompt, max_tokens=8, seed=seed, ignore_eos=True) for seed in range(8)])
    assert stats(engine)["computed_prompt_tokens"] - before == 300 + 7  # each needs the last token's logits
    for reply in replies:
        assert reply.logprobs == pytest.approx(forward_logprobs(engine.model, prompt, reply.token_ids), abs=1e-4)


def test_branches_of_one_conversation_do_not_disturb_each_other(engine: TorchEngine) -> None:
    rng = random.Random(5)
    stem = random_prompt(rng, 100)
    branches = [stem + random_prompt(rng, 20) for _ in range(4)] + [stem[:50] + random_prompt(rng, 40)]
    ask(engine, stem, max_tokens=5)
    replies = ask_all(engine, [request(branch, max_tokens=20, seed=1, ignore_eos=True) for branch in branches])
    for branch, reply in zip(branches, replies, strict=True):
        assert reply.logprobs == pytest.approx(forward_logprobs(engine.model, branch, reply.token_ids), abs=1e-4)


def test_new_weights_are_never_mixed_with_what_old_ones_computed(engine: TorchEngine) -> None:
    prompt = random_prompt(random.Random(6), 200)
    old = ask(engine, prompt, temperature=0.0, max_tokens=5, ignore_eos=True)
    changed = {
        name: value + 0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
        for name, value in engine.model.state_dict().items()
        if name != "lm_head.weight"
    }
    kept = {name: value.clone() for name, value in engine.model.state_dict().items() if name != "lm_head.weight"}
    asyncio.run(engine.load_weights(changed, 5))
    new = ask(engine, prompt, temperature=0.0, max_tokens=5, ignore_eos=True)
    assert (old.versions[0][1], new.versions) == (stats(engine)["version"] and old.versions[0][1], [(0, 5)])
    assert new.cached_prompt_tokens == 0
    assert new.logprobs == pytest.approx(forward_logprobs(engine.model, prompt, new.token_ids), abs=1e-4)
    assert new.logprobs != pytest.approx(old.logprobs, abs=1e-3)
    asyncio.run(engine.load_weights(kept, 6))


def test_weights_that_change_during_a_reply_count_from_the_next_token_on(engine: TorchEngine) -> None:
    prompt = random_prompt(random.Random(7), 50)
    kept = {name: value.clone() for name, value in engine.model.state_dict().items() if name != "lm_head.weight"}
    changed = {name: value * 1.1 for name, value in kept.items()}

    async def scenario() -> None:
        seen = asyncio.Event()
        task = asyncio.create_task(
            engine.generate(request(prompt, max_tokens=400, seed=1, ignore_eos=True), lambda chunk: seen.set())
        )
        await seen.wait()
        await engine.load_weights(changed, 8)
        reply = await task
        (first, _), (start, version) = reply.versions
        assert (first, version) == (0, 8)
        expected = forward_logprobs(engine.model, prompt, reply.token_ids)
        assert reply.logprobs[start:] == pytest.approx(expected[start:], abs=1e-4)

    asyncio.run(scenario())
    asyncio.run(engine.load_weights(kept, 9))
