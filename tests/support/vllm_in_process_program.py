"""The in-process vLLM engine at work, for a Python that has vLLM: `vllm_in_process_program.py MODEL WEIGHTS OUT`.

Writes to OUT, as JSON, what it was answered; `test_vllm_real.py` compares that with forward passes of its own. WEIGHTS
is a folder with other weights for MODEL.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
from collections.abc import Awaitable
from typing import Any

from ajet.engine.vllm.in_process import VllmInProcessEngine
from ajet.engine.vllm.server import VllmSettings
from ajet.schema.chat import Completion, GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import AjetError

LENGTHS = (1, 5, 40, 200)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(500) for _ in range(length)]


def asked(prompt: list[int], deadline: float | None = None, top: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(prompt, Sampling(ignore_eos=True, **sampling), deadline_s=deadline, top_logprobs=top)


async def error_of(work: Awaitable[Any]) -> list[str]:
    """Its type and what it says."""
    try:
        await work
    except AjetError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


async def replies(engine: VllmInProcessEngine) -> dict[str, Any]:
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    requests = [
        asked(prompt, temperature=temperature, seed=3, max_tokens=20)
        for prompt in prompts
        for temperature in (0.0, 0.7)
    ]
    chunks: list[TokenChunk] = []
    streamed = await engine.generate(asked(prompts[0], seed=3, max_tokens=30, top=2), chunks.append)
    cut = streamed.token_ids[8]
    stopped = await engine.generate(asked(prompts[0], seed=3, max_tokens=30, stop_token_ids=(cut,)))
    return {
        "crowd": [
            [request.prompt_ids, request.sampling.temperature, reply]
            for request, reply in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True)
        ],
        "streamed": streamed,
        "chunks": [token for chunk in chunks for token in chunk.token_ids],
        "stopped": stopped,
    }


async def weights(engine: VllmInProcessEngine, folder: str) -> dict[str, Any]:
    """A prompt that is cached is asked again under new weights; a reply is in flight while they change."""
    from safetensors.torch import load_file

    prompt = random_prompt(random.Random(2), 200)
    greedy = asked(prompt, temperature=0.0, max_tokens=10)
    before = [await engine.generate(greedy) for _ in range(2)]
    seen = asyncio.Event()
    long = asked(prompt, temperature=0.0, max_tokens=250)
    flying = asyncio.create_task(engine.generate(long, lambda chunk: seen.set()))
    await seen.wait()
    await engine.load_weights(folder, 7)
    flown = await flying
    after = await engine.generate(greedy)
    await engine.load_weights(load_file(f"{folder}/model.safetensors"), 8)
    again = await engine.generate(greedy)
    wrong = [await error_of(engine.load_weights(source, 9)) for source in (None, "/nowhere")]
    return {"prompt": prompt, "before": before, "flown": flown, "after": after, "again": again, "wrong": wrong}


async def ends(engine: VllmInProcessEngine) -> dict[str, Any]:
    """Requests that are cancelled, late, senseless or too long; a pause."""
    tasks = [asyncio.create_task(engine.generate(asked([5, 6], max_tokens=400))) for _ in range(20)]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    facts: dict[str, Any] = {
        "cancelled": sum(task.cancelled() for task in tasks),
        "late": await error_of(engine.generate(asked([5, 6], deadline=0.05, max_tokens=400))),
        "senseless": await error_of(engine.generate(asked([5], temperature=-1.0))),
        "overflow": await error_of(engine.generate(asked([5] * 600))),
        "unknown_id": await error_of(engine.generate(asked([5, 10**6], max_tokens=3))),
        "too_many_top": await error_of(engine.generate(asked([5], top=900, max_tokens=3))),
    }
    for _ in range(100):  # vLLM hears of the end of a request a moment later
        facts["unfinished"] = engine._llm.output_processor.get_num_unfinished_requests()
        if not facts["unfinished"]:
            break
        await asyncio.sleep(0.05)
    facts["in_flight"] = engine._in_flight
    await engine.pause()
    held = asyncio.create_task(engine.generate(asked([5, 6], max_tokens=3)))
    await asyncio.sleep(0.1)
    facts["held"] = not held.done()
    await engine.resume()
    facts["after"] = await held
    return facts


async def death(engine: VllmInProcessEngine) -> dict[str, Any]:
    """The core is killed, with a reply in flight: once it comes back, the second time it does not."""
    greedy = asked(random_prompt(random.Random(2), 200), temperature=0.0, max_tokens=10)
    facts: dict[str, Any] = {}
    for name in ("first", "second"):
        flying = asyncio.create_task(engine.generate(asked([5, 6], max_tokens=400)))
        await asyncio.sleep(0.5)
        for process in engine._llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        facts[name] = await error_of(flying)
        if name == "first":
            facts["back"] = await engine.generate(greedy)
            facts["starts"] = engine._starts
    facts["given_up"] = await error_of(engine.generate(greedy))
    return facts


async def work(model: str, folder: str) -> dict[str, Any]:
    settings = VllmSettings(
        model, max_model_len=512, max_num_seqs=16, dtype="float32", max_restarts=1, extra_args=("--enforce-eager",)
    )
    engine = VllmInProcessEngine(settings)
    facts = {"replies": await replies(engine), "ends": await ends(engine), "weights": await weights(engine, folder)}
    facts["death"] = await death(engine)
    await engine.aclose()
    facts["closed"] = await error_of(engine.generate(asked([5])))
    asleep = dataclasses.replace(settings, sleep=True)
    misspelt = dataclasses.replace(settings, extra_args=("--enforce-eagre",))
    wrong = dataclasses.replace(settings, extra_args=("--block-size", "many"))
    facts["refused"] = [await error_of(VllmInProcessEngine(each).ready()) for each in (asleep, misspelt, wrong)]
    return facts


def plain(value: Any) -> Any:
    assert isinstance(value, Completion)
    return dataclasses.asdict(value)


if __name__ == "__main__":
    told = asyncio.run(work(sys.argv[1], sys.argv[2]))
    with open(sys.argv[3], "w") as out:
        json.dump(told, out, default=plain)
