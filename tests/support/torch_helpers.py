"""Requests to the embedded engine, and what a plain forward pass gives."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import torch

from ajet.engine.torch.engine import TorchEngine
from ajet.engine.torch.kv_cache import KV, KVPool
from ajet.schema.chat import Completion, GenerateRequest, Sampling

NEAR_TIE = 1e-4
LONGEST = 4096
"""Tokens that a slot of `written` may grow to."""


def written(pool: KVPool, tokens: int) -> KV:
    """A slot full of random keys and values."""
    kv = pool.allocate(tokens, LONGEST)
    assert kv is not None
    kv.keys_LHCD.normal_()
    kv.values_LHCD.normal_()
    return kv


def copied(pool: KVPool, tokens: int, source: KV, length: int) -> KV:
    """`length` tokens of a source, and its own from there on."""
    kv = written(pool, tokens)
    kv.copy_prefix(source, length)
    return kv


def request(
    prompt: list[int], top_logprobs: int = 0, deadline_s: float | None = None, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(prompt, Sampling(**sampling), top_logprobs=top_logprobs, deadline_s=deadline_s)


def ask_all(engine: TorchEngine, requests: list[GenerateRequest]) -> list[Completion]:
    """All at once, from a loop of their own."""

    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(each) for each in requests)))

    return asyncio.run(gather())


def ask(engine: TorchEngine, prompt: list[int], **sampling: Any) -> Completion:
    return ask_all(engine, [request(prompt, **sampling)])[0]


def stats(engine: TorchEngine) -> dict[str, Any]:
    return asyncio.run(engine.stats())


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(500) for _ in range(length)]


def forward_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def forward_logprobs(model: Any, prompt: list[int], drawn: list[int], temperature: float = 1.0) -> list[float]:
    """The logprobs of the drawn tokens by one full forward pass."""
    rows = torch.log_softmax(forward_logits(model, prompt + drawn) / temperature, -1)
    return [float(rows[len(prompt) - 1 + index, token]) for index, token in enumerate(drawn)]
