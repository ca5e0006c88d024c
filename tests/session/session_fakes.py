"""A tracker, a renderer and an engine, small enough to read, for sessions under test."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from ajet.schema.errors import ContextOverflowError, EngineError
from ajet.schema.generation import Completion, EngineCapabilities, GenerateRequest, Sampling, TokenChunk

END = 0


class FakeRenderer:
    """One token a character; 0 ends a turn."""

    end_ids = frozenset({END})

    def decode(self, token_ids: list[int], *, stopped_by: str | int | None = None) -> str:
        text = "".join(chr(token) for token in token_ids if token != END)
        if isinstance(stopped_by, str):
            text = text[: text.index(stopped_by)]
        return text


@dataclass
class FakePrepared:
    call_id: str
    prompt_ids: list[int]
    sampling: Sampling


@dataclass
class FakeTracker:
    """Records what it was asked."""

    max_model_len: int = 100_000
    begun: list[dict[str, Any]] = field(default_factory=list)
    committed: dict[str, Any] = field(default_factory=dict)
    aborted: dict[str, str] = field(default_factory=dict)
    rewards: list[tuple[float, str | None, str | None]] = field(default_factory=list)
    _ids: Any = field(default_factory=itertools.count)

    def begin(self, agent, target, messages, tools, sampling, *, trainable=True, template_kwargs=None):  # type: ignore[no-untyped-def]
        text = "".join(f"<{m['role']}>{m.get('content')}" for m in messages) + "<assistant>"
        room = self.max_model_len - len(text)
        if room <= 0:
            raise ContextOverflowError("the prompt leaves no room")
        call_id = f"c{next(self._ids)}"
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens or room, room))
        self.begun.append(
            {"call_id": call_id, "agent": agent, "target": target, "messages": messages, "tools": tools,
             "sampling": sampling, "trainable": trainable}
        )  # fmt: skip
        return FakePrepared(call_id, [ord(c) for c in text], sampling)

    def commit(self, call_id: str, completion: Completion, reply: dict[str, Any]) -> None:
        assert call_id not in self.committed and call_id not in self.aborted
        self.committed[call_id] = (completion, reply)

    def abort(self, call_id: str, why: str) -> None:
        assert call_id not in self.committed and call_id not in self.aborted
        self.aborted[call_id] = why

    def reward(self, value: float, call: str | None = None, agent: str | None = None) -> None:
        self.rewards.append((value, call, agent))


class FakeEngine:
    """Says its lines one after the other; an exception among them is raised. `gate`: wait for it before speaking."""

    def __init__(self, *lines: str | BaseException, gate: asyncio.Event | None = None) -> None:
        self.lines = list(lines)
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self.gate = gate

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("fake")

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        self.requests.append(request)
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        try:
            if self.gate is not None:
                await self.gate.wait()
            if isinstance(line, BaseException):
                raise line
            ids = [*map(ord, line), END][: request.sampling.max_tokens]
            if on_tokens is not None:
                for token in ids:
                    on_tokens(TokenChunk([token], [-0.5]))
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        done = ids[-1] == END
        return Completion(ids, [-0.5] * len(ids), "stop" if done else "length", END if done else None)

    async def ready(self) -> None: ...
    async def load_weights(self, source: Any, version: int) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def aclose(self) -> None: ...
    async def health(self) -> dict[str, Any]:
        raise EngineError("not now")
