"""The settings of the embedded engine's thread, the requests that it gets through its inbox, and the `Outbox` of its
answers."""

from __future__ import annotations

import asyncio
import queue
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ajet.engine.base import OnTokens
from ajet.schema.chat import Completion, GenerateRequest, TokenChunk


@dataclass(frozen=True, slots=True)
class TorchEngineSettings:
    """Limits and modes."""

    max_model_len: int = 18000
    """Tokens of prompt and reply together."""
    max_num_seqs: int = 64
    """Replies in flight at a time."""
    tokens_per_step: int = 1024
    """Maximum tokens of a forward pass: long prompts are split, so that replies in flight go on meanwhile."""
    kv_cache_gb: float | None = None
    """Memory for keys and values of replies in flight and cached prefixes. None: a share of the free memory."""
    deterministic: bool = False
    """Fixed shapes: a reply depends only on its prompt, its parameters, its seed and the weights."""
    notes_experts: bool = False
    """Say of each token which experts of a mixture it went to."""
    seed: int = 0
    """The seed of requests without one."""
    dtype: str = "auto"
    attn: str = "auto"
    device: str | None = None
    base_bits: int | None = None
    """4: linear layers are stored in 4 bits."""

    @classmethod
    def from_config(cls, config: Any) -> TorchEngineSettings:
        """Read `ajet.model` and `ajet.rollout`."""
        rollout, model = config.ajet.rollout, config.ajet.model
        return cls(
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            kv_cache_gb=rollout.kv_cache_gb,
            deterministic=rollout.deterministic,
            notes_experts=rollout.routing_replay,
            seed=rollout.seed,
            dtype=model.dtype,
            attn=model.attn,
        )


@dataclass(slots=True, eq=False)
class Ticket:
    """A request to the thread, and where its answer goes."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Completion]
    on_tokens: OnTokens | None


Inbox = queue.SimpleQueue[Callable[[Any], None]]
"""What the thread does between two steps: each gets the `EngineThread`."""


class Outbox:
    """Collects a step's results, and delivers them in one call per event loop."""

    def __init__(self) -> None:
        self._calls: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)

    def tokens(self, ticket: Ticket, token: int, logprob: float) -> None:
        if ticket.on_tokens is not None:
            chunk = TokenChunk([token], [logprob])
            self._calls[ticket.loop].append(partial(_stream, ticket.on_tokens, chunk, ticket.answer))

    def complete(self, ticket: Ticket, completion: Completion) -> None:
        answer = ticket.answer
        self._calls[ticket.loop].append(lambda: None if answer.done() else answer.set_result(completion))

    def fail(self, ticket: Ticket, error: Exception) -> None:
        answer = ticket.answer
        self._calls[ticket.loop].append(lambda: None if answer.done() else answer.set_exception(error))

    def flush(self) -> None:
        """Deliver everything. A closed loop is skipped, as nothing waits there."""
        for loop, calls in self._calls.items():
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(_run_all, calls)
        self._calls.clear()


def _stream(on_tokens: OnTokens, chunk: TokenChunk, answer: asyncio.Future[Completion]) -> None:
    """Pass new tokens on. If the receiver raises, its request has failed, and no other."""
    if answer.done():
        return
    try:
        on_tokens(chunk)
    except Exception as error:  # noqa: BLE001 - the caller gets it
        answer.set_exception(error)


def _run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
