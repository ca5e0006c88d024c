"""The real vLLM, where it is installed: `make test-vllm`, or AJET_VLLM_PYTHON=/path/to/its/python.

Its replies and logprobs must be those of a forward pass, and new weights must count at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from ajet.engine.model_source import ModelSource
from ajet.engine.vllm.server import VllmSettings
from ajet.engine.vllm.server_engine import VllmServerEngine
from ajet.observe.metrics import read_metrics
from ajet.schema.chat import Completion, TokenChunk
from ajet.schema.errors import ConfigError, InvalidRequestError
from support.torch_helpers import NEAR_TIE, forward_logits, forward_logprobs, random_prompt, request

PYTHON = os.environ.get("AJET_VLLM_PYTHON", "")
ROOT = Path(__file__).parents[2]

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
        python=PYTHON,
        start_timeout_s=900.0,
        heartbeat_s=30.0,
        lora_rank=8,
        log_folder=tmp_path_factory.mktemp("vllm"),
    )
    engine, loop = VllmServerEngine(settings), Loop()
    try:
        loop.run(engine.ready())
        yield engine, loop
    finally:
        loop.run(engine.aclose())


def ask_all(vllm: tuple[VllmServerEngine, Loop], requests: list[Any]) -> list[Completion]:
    engine, loop = vllm

    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(each) for each in requests)))

    replies: list[Completion] = loop.run(gather())
    return replies


def assert_greedy(model: Any, prompt: list[int], drawn: list[int]) -> None:
    """Every token is the likeliest one, or as good as it."""
    rows = forward_logits(model, prompt + drawn)[len(prompt) - 1 : -1]
    for row, token in zip(rows, drawn, strict=True):
        assert float(row.max() - row[token]) < NEAR_TIE


def changed_model() -> Any:
    """The model with other weights."""
    model = ModelSource.resolve("tiny:qwen2").model()
    with torch.no_grad():
        for value in model.parameters():  # all of them: vLLM must forget none
            value.add_(0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
    return model


def test_greedy_replies_and_logprobs_are_the_models(vllm: tuple[VllmServerEngine, Loop]) -> None:
    model = ModelSource.resolve("tiny:qwen2").model()
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 5, 40, 200)]
    greedy = ask_all(vllm, [request(prompt, temperature=0.0, max_tokens=20, ignore_eos=True) for prompt in prompts])
    for prompt, reply in zip(prompts, greedy, strict=True):
        assert reply.logprobs == pytest.approx(forward_logprobs(model, prompt, reply.token_ids), abs=1e-4)
        assert_greedy(model, prompt, reply.token_ids)
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
    model = changed_model()
    prompt = random_prompt(random.Random(2), 300)  # the CPU build caches blocks of 128 tokens
    asked = request(prompt, temperature=0.0, max_tokens=10, ignore_eos=True)
    first, second = (ask_all(vllm, [asked])[0] for _ in range(2))
    assert first.cached_prompt_tokens == 0 < second.cached_prompt_tokens
    model.save_pretrained(tmp_path / "changed")
    loop.run(engine.load_weights(tmp_path / "changed", 7))
    (reply,) = ask_all(vllm, [asked])
    assert (reply.versions, reply.cached_prompt_tokens) == ([(0, 7)], 0)
    assert reply.logprobs == pytest.approx(forward_logprobs(model, prompt, reply.token_ids), abs=1e-4)


def test_weights_that_change_during_a_reply_count_from_the_next_token_on(
    vllm: tuple[VllmServerEngine, Loop], tmp_path: Path
) -> None:
    engine, loop = vllm
    old, new = ModelSource.resolve("tiny:qwen2").model(), changed_model()
    old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    prompt = random_prompt(random.Random(3), 100)

    async def scenario() -> Completion:
        await engine.load_weights(tmp_path / "old", 8)
        begun = asyncio.Event()
        asked = request(prompt, temperature=0.0, max_tokens=400, ignore_eos=True)
        reply = asyncio.create_task(engine.generate(asked, lambda chunk: begun.set()))
        await begun.wait()
        await engine.load_weights(tmp_path / "new", 9)
        return await reply

    reply: Completion = loop.run(scenario())
    (begin, before), (start, after) = reply.versions
    assert (begin, before, after, len(reply.token_ids)) == (0, 8, 9, 400)
    for model, part in ((old, slice(0, start)), (new, slice(start, None))):
        expected = forward_logprobs(model, prompt, reply.token_ids)
        assert reply.logprobs[part] == pytest.approx(expected[part], abs=1e-4)


@pytest.mark.parametrize("wrong", [{"prompt": [5, 10**6]}, {"prompt": [5], "top_logprobs": 900}])
def test_a_request_that_vllm_refuses_is_an_invalid_request(
    vllm: tuple[VllmServerEngine, Loop], wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        ask_all(vllm, [request(**wrong, max_tokens=3)])


@pytest.mark.parametrize("wrong", [("--enforce-eagre",), ("--block-size", "many")])
def test_an_argument_that_vllm_does_not_take_is_named(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    model = ModelSource.resolve("tiny:qwen2").path
    settings = VllmSettings(model, python=PYTHON, extra_args=wrong, log_folder=tmp_path)
    with pytest.raises(ConfigError, match=rf"^rollout\.vllm\.extra_args: .*{wrong[0]}"):
        asyncio.run(VllmServerEngine(settings).ready())


def test_the_documented_command_trains_without_a_gpu(tmp_path: Path) -> None:
    """The environment has nothing for vLLM or PyTorch: the launcher sets what is needed, and says so."""
    page = (ROOT / "docs" / "engines.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("ajet --conf configs/quickstart.yaml")]
    command = line.replace("/opt/vllm/bin/python", PYTHON).split()
    command += ["trainer_common.total_training_steps=2", "--exp-dir", str(tmp_path)]
    clean = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR", "LANG") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=clean, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("vLLM's CPU build is started with TORCH_COMPILE_DISABLE=1") == 1
    warnings = [line for line in said.splitlines() if line.startswith("warning:")]
    assert all("engine did not end in time" in warning for warning in warnings), "which a busy machine may say"
    steps = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")
    gaps = [step["loss/sampler_gap_max"] for step in steps if "loss/sampler_gap_max" in step]
    assert len(gaps) == 2 and max(gaps) < 1e-3


def write_adapter(folder: Path, seed: int) -> Any:
    """A LoRA adapter of random numbers, and the model that it makes of `changed_model`."""
    rank, alpha, model = 8, 16, changed_model()
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "v_proj")):
                down = torch.randn(rank, module.in_features, generator=rng) / module.in_features**0.5
                up = torch.randn(module.out_features, rank, generator=rng) / rank**0.5
                tensors[f"base_model.model.{name}.lora_A.weight"] = down
                tensors[f"base_model.model.{name}.lora_B.weight"] = up
                module.weight.add_(alpha / rank * up @ down)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return model


def test_adapters_are_swapped_and_prefixes_of_the_last_one_not_used(
    vllm: tuple[VllmServerEngine, Loop], tmp_path: Path
) -> None:
    engine, loop = vllm
    base = changed_model()
    base.save_pretrained(tmp_path / "base")
    prompt = random_prompt(random.Random(4), 100)
    asked = request(prompt, temperature=0.0, max_tokens=10, ignore_eos=True)
    loop.run(engine.load_weights(tmp_path / "base", 20))
    steps = [(20, base)]
    for version in (21, 22):
        folder = tmp_path / f"adapter-{version}"
        steps.append((version, write_adapter(folder, version)))
        ask_all(vllm, [asked])  # a prefix under the weights before
        loop.run(engine.load_weights(folder, version))
        first, second = (ask_all(vllm, [asked])[0] for _ in range(2))
        for reply in (first, second):
            assert reply.versions == [(0, version)]
            expected = forward_logprobs(steps[-1][1], prompt, reply.token_ids)
            assert reply.logprobs == pytest.approx(expected, abs=1e-4)
        stale = forward_logprobs(steps[-2][1], prompt, first.token_ids)
        assert first.logprobs != pytest.approx(stale, abs=1e-2)
    loop.run(engine.load_weights(tmp_path / "base", 23))
    (reply,) = ask_all(vllm, [asked])
    assert reply.logprobs == pytest.approx(forward_logprobs(base, prompt, reply.token_ids), abs=1e-4)


def test_without_its_key_a_server_does_nothing(vllm: tuple[VllmServerEngine, Loop]) -> None:
    """Not on any route that the real server has, among them those that call into its workers."""
    (replica,) = vllm[0]._replicas
    with httpx.Client(base_url=replica.server.base_url) as client:
        right = {"Authorization": f"Bearer {replica.server.key}"}
        routes = client.get("/openapi.json", headers=right).json()["paths"]
        assert {"/collective_rpc", "/pause", "/resume", "/v1/completions"} <= set(routes)
        assert client.get("/health").status_code == 200
        for path in {"/openapi.json", "/docs", "/metrics", *routes} - {"/health"}:
            for method in ("GET", "POST"):
                for headers in ({}, {"Authorization": f"Bearer {replica.server.key}x"}):
                    assert client.request(method, path, headers=headers).status_code == 401, (method, path)
    (reply,) = ask_all(vllm, [request(list(range(40, 60)), temperature=0.0, max_tokens=4, ignore_eos=True)])
    assert len(reply.token_ids) == 4


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
