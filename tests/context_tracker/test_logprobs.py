"""With a real model: a full forward pass over each sample gives back the logprobs that the engine recorded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from ajet.context_tracker import ContextTracker, Renderer, linear_samples
from ajet.engine.model_source import ModelSource
from ajet.engine.torch.commands import TorchEngineSettings
from ajet.engine.torch.engine import TorchEngine
from ajet.schema.chat import GenerateRequest, Sampling
from ajet.schema.episode import CallTree, Sample
from support.tracker_helpers import SEARCH, WIDE, said, system, user

TOLERANCE = 1e-4
TEMPERATURES = (0.0, 0.6, 1.0, 1.4)


async def episode(engine: TorchEngine, renderer: Renderer) -> CallTree:
    """Two agents, a tool, a retry, a rewritten memory; each call at a different temperature."""
    tracker = ContextTracker(renderer, replace(WIDE, checks=()))
    count = 0

    async def ask(agent: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
        nonlocal count
        temperature = TEMPERATURES[count % len(TEMPERATURES)]
        sampling = Sampling(temperature=temperature, max_tokens=12, seed=count)
        count += 1
        call = tracker.begin(agent, "target", messages, tools, sampling)
        completion = await engine.generate(GenerateRequest(call.prompt_ids, call.sampling, "episode"))
        text = renderer.decode(completion.token_ids, stopped_by=completion.stopped_by)
        completion.finish_reason = "stop"  # an untrained model doesn't end within twelve tokens: pretend it did
        reply = said(text)
        tracker.commit(call.call_id, completion, reply, text=text)
        messages.append(reply)

    first, second = [system(), user("What is 3 + 4?")], [user("Write a note.")]
    for turn in range(4):
        await asyncio.gather(ask("solver", first, [SEARCH]), ask("writer", second, []))
        first.append(user(f"And {turn}?"))
        second.append(user("More."))
        if turn == 1:
            await ask("solver", [*first], [SEARCH])
        if turn == 2:
            first[1:] = [user("So far: nothing. Go on.")]
    return tracker.finish(1.0).tree


def largest_error(model: Any, tree: CallTree, sample: Sample) -> float:
    ids = torch.tensor([sample.prompt_ids.tolist() + sample.response_ids.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    temperatures = [tree.calls[c].sampling.temperature or 1.0 if c >= 0 else 1.0 for c in sample.call_of_token.tolist()]
    scaled = torch.log_softmax(logits / torch.tensor(temperatures)[:, None], -1)
    ours = scaled.gather(1, torch.tensor(sample.response_ids.tolist())[:, None])[:, 0]
    mask = torch.tensor(sample.response_mask)
    return float((ours - torch.tensor(sample.logprobs)).abs()[mask].max())


@pytest.mark.parametrize("name", ["tiny:qwen2", "tiny:qwen3"])
def test_a_forward_pass_over_each_sample_gives_the_recorded_logprobs(name: str) -> None:
    source = ModelSource.resolve(name)
    renderer = Renderer(source.tokenizer())

    async def run() -> CallTree:
        engine = TorchEngine(name, TorchEngineSettings(max_model_len=2048, max_num_seqs=8))
        try:
            return await episode(engine, renderer)
        finally:
            await engine.aclose()

    tree = asyncio.run(run())
    model = source.model("float32")
    samples, ledger = linear_samples(tree, max_prompt_length=9999, max_response_length=9999, max_samples=99)
    assert ledger.trained == tree.trained_tokens >= 80
    errors = [largest_error(model, tree, sample) for sample in samples]
    print(f"{name}: {len(samples)} samples, {ledger.trained} tokens, largest logprob error {max(errors):.2e}")
    assert max(errors) <= TOLERANCE
