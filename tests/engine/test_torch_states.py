"""Models that keep a state from token to token: however their tokens are cut into steps, they get the logits of a plain
forward pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch

from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from ajet.engine.torch.kv_cache import KVPool
from ajet.engine.torch.readers import PassPart
from ajet.engine.torch.runner import Runner, Work
from ajet.schema.errors import FeatureUnavailableError
from support.hybrids import HYBRIDS, STATEFUL, hybrid_model
from support.torch_helpers import ask, ask_all, forward_logits, forward_logprobs, random_prompt, request, stats

EXACT = {"Qwen3.5-MoE": 2e-5}
"""Where the model's own log-probabilities differ by more than 1e-5 between passes with its cache, cut in the same
places, and one without: by 1.3e-5, as much as the engine's. Qwen3-Next's differ by 6e-6, Zamba 2's by 4e-6."""


@pytest.mark.parametrize("family", STATEFUL)
def test_any_chunks_of_several_sequences_give_the_logits_of_a_plain_pass(family: str) -> None:
    model = hybrid_model(family)
    runner = Runner(model)
    rng = random.Random(0)
    pool = KVPool(runner.kv_shape, runner.dtype, runner.device, 1 << 14)
    sequences = [random_prompt(rng, length) for length in (71, 40, 1, 23, 66)]
    slots = [pool.allocate(len(tokens), 128) for tokens in sequences]
    done = [0] * len(sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(at < len(tokens) for at, tokens in zip(done, sequences, strict=True)):
        rows, chunks, order = [], [], []
        for index, (tokens, kv) in enumerate(zip(sequences, slots, strict=True)):
            count = min(rng.choice([1, 1, 2, 5, 17, 33]), len(tokens) - done[index])
            if count and kv is not None and rng.random() < 0.8:
                work = Work(PassPart(kv, done[index], count), tokens[done[index] : done[index] + count], True)
                (rows if count == 1 else chunks).append(work)
                order.append((count > 1, index, count))
        for (_, index, count), row in zip(
            sorted(order, key=lambda one: one[0]), runner.forward(rows, chunks), strict=True
        ):
            done[index] += count
            found[index].append(torch.stack([row.new_tensor(done[index] - 1), *row.log_softmax(-1)]))
    for tokens, rows_found in zip(sequences, found, strict=True):
        plain = forward_logits(model, tokens).log_softmax(-1)
        for row in rows_found:
            torch.testing.assert_close(row[1:], plain[int(row[0])], rtol=0, atol=EXACT.get(family, 1e-5))


@pytest.fixture(scope="module")
def engine() -> Iterator[TorchEngine]:
    engine = TorchEngine(hybrid_model("Qwen3.5"), TorchEngineSettings(max_model_len=1024, tokens_per_step=128))
    asyncio.run(engine.ready())
    yield engine
    asyncio.run(engine.aclose())


def test_a_conversation_goes_on_from_the_end_of_its_last_turn(engine: TorchEngine) -> None:
    rng = random.Random(3)
    prompt: list[int] = []
    for turn in range(5):
        message = random_prompt(rng, 30)
        before = stats(engine)["computed_prompt_tokens"]
        prompt = prompt + message
        reply = ask(engine, prompt, temperature=1.0, max_tokens=10, seed=turn, ignore_eos=True)
        assert stats(engine)["computed_prompt_tokens"] - before == len(message) + (1 if turn else 0)
        assert reply.logprobs == pytest.approx(forward_logprobs(engine.model, prompt, reply.token_ids), abs=1e-5)
        prompt = prompt + reply.token_ids


def test_a_group_computes_its_prompt_once_and_another_reply_begins_at_its_end(engine: TorchEngine) -> None:
    prompt = random_prompt(random.Random(4), 300)
    before = stats(engine)["computed_prompt_tokens"]
    replies = ask_all(engine, [request(prompt, max_tokens=8, seed=seed, ignore_eos=True) for seed in range(8)])
    assert stats(engine)["computed_prompt_tokens"] - before == 300 + 7
    again = ask(engine, prompt, max_tokens=8, ignore_eos=True)
    assert again.cached_prompt_tokens == 299
    for reply in [*replies, again]:
        assert reply.logprobs == pytest.approx(forward_logprobs(engine.model, prompt, reply.token_ids), abs=1e-5)


def test_a_beginning_without_a_kept_state_is_computed_again(engine: TorchEngine) -> None:
    rng = random.Random(5)
    stem = random_prompt(rng, 100)
    branches = [stem[:80] + random_prompt(rng, 20) for _ in range(3)] + [stem + random_prompt(rng, 9)]
    first = ask(engine, stem, max_tokens=5, ignore_eos=True)
    replies = ask_all(engine, [request(branch, max_tokens=20, seed=1, ignore_eos=True) for branch in branches])
    assert [reply.cached_prompt_tokens for reply in replies] == [0, 0, 0, 99]
    for branch, reply in zip([stem, *branches], [first, *replies], strict=True):
        assert reply.logprobs == pytest.approx(forward_logprobs(engine.model, branch, reply.token_ids), abs=1e-5)


def test_new_weights_drop_the_states_of_old_ones(engine: TorchEngine) -> None:
    prompt = random_prompt(random.Random(6), 200)
    old = ask(engine, prompt, temperature=0.0, max_tokens=5, ignore_eos=True)
    changed = {name: value * 1.05 for name, value in engine.model.state_dict().items()}
    asyncio.run(engine.load_weights(changed, 5))
    new = ask(engine, prompt, temperature=0.0, max_tokens=5, ignore_eos=True)
    assert new.cached_prompt_tokens == 0
    assert new.logprobs == pytest.approx(forward_logprobs(engine.model, prompt, new.token_ids), abs=1e-5)
    assert new.logprobs != pytest.approx(old.logprobs, abs=1e-3)


def test_deterministic_replies_do_not_depend_on_the_batch_or_on_what_is_cached() -> None:
    settings = TorchEngineSettings(max_model_len=512, max_num_seqs=4, deterministic=True)
    engine = TorchEngine(hybrid_model("Qwen3.5"), settings)
    rng = random.Random(7)
    stem = random_prompt(rng, 150)
    prompts = [stem + random_prompt(rng, length) for length in (3, 20, 61)] + [stem]
    asked = [request(prompt, max_tokens=12, seed=9, ignore_eos=True) for prompt in prompts]
    together = ask_all(engine, asked)
    alone = [ask_all(engine, [each])[0] for each in asked]
    assert any(reply.cached_prompt_tokens for reply in alone)
    assert [(reply.token_ids, reply.logprobs) for reply in together] == [
        (reply.token_ids, reply.logprobs) for reply in alone
    ]
    asyncio.run(engine.aclose())


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("MiniMax", "linear_attention keep their state outside transformers' cache"),
        ("RecurrentGemma", "linear_attention keep their state outside transformers' cache"),
        ("Mamba", "none of its layers attends"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(family: str, why: str) -> None:
    assert HYBRIDS[family]
    with pytest.raises(FeatureUnavailableError, match=why):
        Runner(hybrid_model(family))
