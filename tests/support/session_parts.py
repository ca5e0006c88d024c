"""Real sessions for tests: a tiny tokenizer and template, tracker, parser; only the engine's lines are scripted."""

from __future__ import annotations

import asyncio
from functools import cache
from types import SimpleNamespace
from typing import Any

from ajet.config.root import HelperConfig
from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings
from ajet.engine.model_source import ModelSource
from ajet.gateway.chat import EpisodeSession, SessionSettings, pick_parser
from ajet.schema.chat import Completion, EngineCapabilities, GenerateRequest, TokenChunk

CONFIG = SimpleNamespace(ajet=SimpleNamespace(rollout=SimpleNamespace(max_model_len=100_000), helper=HelperConfig()))
USER = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@cache
def tokenizer() -> Any:
    return ModelSource.resolve("tiny:qwen2").tokenizer()


@cache
def renderer() -> Renderer:
    return Renderer(tokenizer())


def count(text: str) -> int:
    """Tokens of a reply, including its end token."""
    return len(tokenizer().encode(text, add_special_tokens=False)) + 1


class LineEngine:
    """Says its lines one after another, and the last one from then on; an exception among them is raised.

    `gate`: an event to wait for before speaking.
    """

    def __init__(self, *lines: str | BaseException, gate: asyncio.Event | None = None) -> None:
        self.lines = list(lines)
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self.gate = gate

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("lines")

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        self.requests.append(request)
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if isinstance(line, BaseException):
                raise line
            end = tokenizer().eos_token_id
            ids = [*tokenizer().encode(line, add_special_tokens=False), end][: request.sampling.max_tokens]
            if on_tokens is not None:
                for token in ids:
                    on_tokens(TokenChunk([token], [-0.5]))
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        done = ids[-1] == end
        return Completion(ids, [-0.5] * len(ids), "stop" if done else "length", end if done else None)

    async def ready(self) -> None: ...
    async def load_weights(self, source: Any, version: int) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def aclose(self) -> None: ...


def new_session(
    engine: Any,
    settings: SessionSettings | None = None,
    tracking: TrackerSettings | None = None,
    **more: Any,
) -> EpisodeSession:
    """Call this on a running loop."""
    return EpisodeSession(
        episode_id="e",
        tracker=ContextTracker(renderer(), tracking or TrackerSettings(max_model_len=100_000, checks=())),
        renderer=renderer(),
        engine=engine,
        settings=settings or SessionSettings(),
        **{"parser": pick_parser(tokenizer()), **more},
    )


def replied(session: EpisodeSession) -> list[Any]:
    """The calls that got a reply."""
    return [call for call in session.tracker.calls if call.drop != "aborted"]


def aborted(session: EpisodeSession) -> list[str]:
    """Why calls got no reply."""
    return [call.reply["aborted"] for call in session.tracker.calls if call.drop == "aborted"]
