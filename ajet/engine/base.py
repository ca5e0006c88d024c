"""The `Engine` protocol, where tokens come from, and what engines share: checks of requests and stop rules."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ajet.schema.chat import Completion, EngineCapabilities, FinishReason, GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import ContextOverflowError, EngineError, GenerationTimeoutError, InvalidRequestError

OnTokens = Callable[[TokenChunk], None]


@runtime_checkable
class Engine(Protocol):
    """Generates replies: token ids in, token ids and logprobs out.

    Cancelling the awaiting task cancels the generation. Failures are `ajet.schema.errors.EngineError`s.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    async def ready(self) -> None:
        """Return when the engine can generate; raise any error from loading.

        This may take long: weights load in the background while the workflow starts. `generate` waits for it.
        """

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Generate one reply. `on_tokens` is called on the awaiting event loop."""
        ...

    async def load_weights(self, source: Any, version: int) -> None:
        """Serve these weights from now on, as this policy version. Prefixes cached earlier are never used again.

        An engine with weights of its own that dies meanwhile, or later, comes back with them. One that sleeps wakes
        first."""

    async def pause(self) -> None:
        """Stop starting requests, and wait until none is in flight. An engine that can sleep then goes to sleep."""

    async def resume(self) -> None: ...

    async def aclose(self) -> None: ...


class RequestGate:
    """What `pause` and `resume` of an engine close and open."""

    def __init__(self) -> None:
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._in_flight = 0

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Around a request, which begins once the gate is open."""
        await self._open.wait()
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def close(self) -> None:
        """Let no request begin, and wait until none is in flight."""
        self._open.clear()
        await self._idle.wait()

    def open(self) -> None:
        self._open.set()


@asynccontextmanager
async def reply_deadline(request: GenerateRequest) -> AsyncIterator[None]:
    """Around a request: raises a GenerationTimeoutError at its deadline."""
    try:
        async with asyncio.timeout(request.deadline_s):
            yield
    except TimeoutError as error:
        raise GenerationTimeoutError(f"no reply within its deadline of {request.deadline_s:.1f} s") from error


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """An engine's devices and memory needs, as decided by the trainer that shares the machine."""

    device: str | None = None
    """The embedded engine's device. None: a GPU if there is one."""
    gpus: tuple[int, ...] = ()
    """The GPUs of vLLM's servers, instead of `rollout.vllm.devices`."""
    adapter_rank: int = 0
    """The rank of the LoRA adapters that vLLM will load."""
    base_bits: int | None = None
    """The bits per weight of the embedded engine's linear layers."""


def weights_folder(source: Any) -> Path:
    """The folder that an engine's servers are to read their weights from."""
    if not isinstance(source, str | Path):
        raise EngineError("the engine's servers read their weights from a folder: pass a folder to load_weights")
    return Path(source)


Decode = Callable[[list[int]], str]


def check_request(request: GenerateRequest, *, max_model_len: int, vocabulary: int | None = None) -> int:
    """Return how many tokens the reply may have; raise InvalidRequestError or ContextOverflowError.

    `vocabulary` is the number of token ids; None if only the server knows it. Other sampling parameters are checked
    where they are read; these two may come from a command line as they are.
    """
    temperature, wanted = request.sampling.temperature, request.sampling.max_tokens
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidRequestError(f"temperature must be a number 0 or more, not {temperature!r}")
    if wanted is not None and wanted < 1:
        raise InvalidRequestError(f"max_tokens must be a positive integer, not {wanted!r}")
    _check_ids(request.prompt_ids, vocabulary)
    if not request.prompt_ids:
        raise InvalidRequestError("prompt_ids is empty: a prompt needs at least one token")
    room = max_model_len - len(request.prompt_ids)
    if room < 1:
        raise ContextOverflowError(
            f"the prompt has {len(request.prompt_ids)} tokens, but prompt and reply must fit into max_model_len="
            f"{max_model_len}: shorten the conversation or raise rollout.max_model_len"
        )
    return room if wanted is None else min(room, wanted)


def _check_ids(ids: list[int], vocabulary: int | None) -> None:
    array = np.asarray(ids)
    if array.size == 0:
        return
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError("prompt_ids must be a flat list of integers")
    if int(array.min()) < 0:
        raise InvalidRequestError("prompt_ids holds a negative id")
    if vocabulary is not None and int(array.max()) >= vocabulary:
        raise InvalidRequestError(f"prompt_ids holds an id outside the vocabulary (0 … {vocabulary - 1})")


class StopMatch(NamedTuple):
    """How a reply ended."""

    reason: FinishReason
    by: str | int | None


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a reply is over."""

    ids: frozenset[int]
    strings: tuple[str, ...]
    max_tokens: int
    window: int
    """Tokens to search: a stop string that the last token completes lies within them, at one byte or more per token."""

    @classmethod
    def of(cls, sampling: Sampling, end_ids: Iterable[int], max_tokens: int) -> StopRule:
        """The rule for one request; `ignore_eos` disables only the model's own end tokens."""
        ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(end_ids))
        longest = max((len(text.encode()) for text in sampling.stop), default=0)
        return cls(ids, tuple(sampling.stop), max_tokens, longest + 1)

    def check(self, drawn: list[int], decode: Decode) -> StopMatch | None:
        """Whether the newest of the drawn tokens ends the reply."""
        if drawn[-1] in self.ids:
            return StopMatch("stop", drawn[-1])
        if self.strings:
            text = decode(drawn[-self.window :])
            for string in self.strings:
                if string in text:
                    return StopMatch("stop", string)
        return StopMatch("length", None) if len(drawn) >= self.max_tokens else None
