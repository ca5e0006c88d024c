"""vLLM's half of a part of `gpu_check.py`, in the Python that has vLLM: replies, new weights, sleep and waking.

`_gpu_vllm.py JOB` answers the JSON file in another one beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

JOB: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
ON_GPU = JOB["device"] == "cuda"
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def settings() -> Any:
    from ajet.engine.vllm.server import VllmSettings

    return VllmSettings(
        model=JOB["model"],
        max_model_len=512,
        max_num_seqs=8,
        dtype=JOB["dtype"],
        gpu_memory_utilization=0.5,
        sleep=ON_GPU,
        lora_rank=JOB["lora_rank"],
    )


def free_mib() -> float:
    import torch

    return round(torch.cuda.mem_get_info()[0] / 2**20, 1)


async def replies(engine: Any, which: int, temperature: float = 1.0) -> list[Any]:
    from ajet.schema.chat import GenerateRequest, Sampling

    requests = [
        GenerateRequest(prompt, Sampling(temperature, max_tokens=JOB["reply"], seed=index, ignore_eos=True))
        for index, prompt in enumerate(JOB["prompts"][which])
    ]
    return list(await asyncio.gather(*map(engine.generate, requests)))


def drawn(found: list[Any]) -> list[dict[str, Any]]:
    return [{"token_ids": reply.token_ids, "logprobs": reply.logprobs} for reply in found]


async def sleep(engine: Any) -> dict[str, Any]:
    """The GPU's memory before, during and after, and whether the same weights answer afterwards."""
    if not ON_GPU:
        return {"not_measured": "on a CPU there is nothing to leave"}
    before = await replies(engine, 0, 0.0)
    awake = free_mib()
    await engine.pause()
    asleep = free_mib()
    await engine.resume()
    after = await replies(engine, 0, 0.0)
    pairs = list(zip(before, after, strict=True))
    same = sum(one.token_ids == other.token_ids for one, other in pairs)
    gap = max(abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs)  # later tokens may follow others
    figures = {"free_awake_mib": awake, "free_asleep_mib": asleep, "free_again_mib": free_mib()}
    return {"ok": same > 0 and asleep > awake, "same_replies": same, "of": len(before), "gap": gap, **figures}


async def answer() -> dict[str, Any]:
    from ajet.engine.vllm.server_engine import VllmServerEngine

    engine = VllmServerEngine(settings())
    try:
        first = await replies(engine, 0)
        slept = await sleep(engine)
        await engine.pause()
        await engine.load_weights(Path(JOB["changed"]), 1)
        await engine.resume()
        second = await replies(engine, 1)
    finally:
        await engine.aclose()
    versions = sorted({version for reply in second for _, version in reply.versions})
    return {"first": drawn(first), "second": drawn(second), "versions": versions, "sleep": slept}


if __name__ == "__main__":
    Path(sys.argv[1]).with_suffix(".answer").write_text(json.dumps(asyncio.run(answer())))
