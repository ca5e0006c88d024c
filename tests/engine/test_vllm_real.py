"""The real vLLM, where it is installed: `make test-vllm`, or AJET_VLLM_PYTHON=/path/to/its/python.

Its replies must be those of the embedded engine, its logprobs those of a forward pass, and new weights must count at
once.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_helpers import NEAR_TIE, forward_logits, forward_logprobs, random_prompt, request

from ajet.engine.model_source import ModelSource
from ajet.engine.vllm.server_engine import VllmServerEngine
from ajet.engine.vllm.settings import VllmSettings
from ajet.schema.generation import Completion, TokenChunk

PYTHON = os.environ.get("AJET_VLLM_PYTHON", "")
CPU = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="AJET_VLLM_PYTHON names no Python with vLLM"),
]


class Loop:
    """An event loop that outlives a test, as the engine watches its servers from it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServerEngine, Loop]]:
    settings = VllmSettings(
        ModelSource.resolve("tiny:qwen2").path,
        max_model_len=512,
        max_num_seqs=16,
        dtype="float32",
        python=PYTHON,
        start_timeout_s=900.0,
        heartbeat_s=30.0,
        extra_args=("--enforce-eager",),
        log_folder=tmp_path_factory.mktemp("vllm"),
    )
    before = {name: os.environ.get(name) for name in CPU}
    os.environ.update(CPU)
    engine, loop = VllmServerEngine(settings), Loop()
    try:
        loop.run(engine.ready())
        yield engine, loop
    finally:
        loop.run(engine.aclose())
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def ask_all(vllm: tuple[VllmServerEngine, Loop], requests: list[Any]) -> list[Completion]:
    engine, loop = vllm

    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(each) for each in requests)))

    replies: list[Completion] = loop.run(gather())
    return replies


def test_greedy_replies_and_logprobs_are_the_models(vllm: tuple[VllmServerEngine, Loop]) -> None:
    model = ModelSource.resolve("tiny:qwen2").model()
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 5, 40, 200)]
    greedy = ask_all(vllm, [request(prompt, temperature=0.0, max_tokens=20, ignore_eos=True) for prompt in prompts])
    for prompt, reply in zip(prompts, greedy, strict=True):
        assert reply.logprobs == pytest.approx(forward_logprobs(model, prompt, reply.token_ids), abs=1e-4)
        rows = forward_logits(model, prompt + reply.token_ids)[len(prompt) - 1 : -1]
        for row, token in zip(rows, reply.token_ids, strict=True):
            assert float(row.max() - row[token]) < NEAR_TIE
    warm = ask_all(vllm, [request(prompt, temperature=0.7, seed=3, max_tokens=20) for prompt in prompts])
    for prompt, reply in zip(prompts, warm, strict=True):
        assert reply.logprobs == pytest.approx(forward_logprobs(model, prompt, reply.token_ids, 0.7), abs=1e-4)


def test_ends_streams_and_top_logprobs(vllm: tuple[VllmServerEngine, Loop]) -> None:
    engine, loop = vllm
    prompt = list(range(40, 60))
    chunks: list[TokenChunk] = []
    free: Completion = loop.run(
        engine.generate(request(prompt, seed=3, max_tokens=30, top_logprobs=2, ignore_eos=True), chunks.append)
    )
    assert [token for chunk in chunks for token in chunk.token_ids] == free.token_ids
    assert free.finish_reason == "length"
    assert free.top_logprobs is not None
    assert len(free.top_logprobs) == 30
    cut = free.token_ids[8]
    (stopped,) = ask_all(vllm, [request(prompt, seed=3, max_tokens=30, ignore_eos=True, stop_token_ids=(cut,))])
    assert (stopped.finish_reason, stopped.stopped_by) == ("stop", cut)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(cut) + 1]


def test_new_weights_count_at_once(vllm: tuple[VllmServerEngine, Loop], tmp_path: Path) -> None:
    engine, loop = vllm
    model = ModelSource.resolve("tiny:qwen2").model()
    prompt = random_prompt(random.Random(2), 100)
    ask_all(vllm, [request(prompt, temperature=0.0, max_tokens=5)])
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("proj.weight"):
                value.add_(0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    loop.run(engine.load_weights(state, 7))
    (reply,) = ask_all(vllm, [request(prompt, temperature=0.0, max_tokens=10, ignore_eos=True)])
    assert reply.versions == [(0, 7)]
    assert reply.logprobs == pytest.approx(forward_logprobs(model, prompt, reply.token_ids), abs=1e-4)


def test_a_cancelled_request_frees_its_place(vllm: tuple[VllmServerEngine, Loop]) -> None:
    engine, loop = vllm

    async def scenario() -> None:
        tasks = [
            asyncio.create_task(engine.generate(request([5, 6], max_tokens=400, ignore_eos=True))) for _ in range(20)
        ]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await engine.generate(request([5, 6], max_tokens=3, ignore_eos=True))).token_ids

    loop.run(scenario())
