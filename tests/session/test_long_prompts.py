"""What cannot fit into the model's context is refused before time or memory goes into it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from session_parts import LineEngine, new_session, renderer

from ajet.context_tracker import TrackerSettings
from ajet.schema.chat import ChatRequest
from ajet.schema.errors import ContextOverflowError

TRACKING = TrackerSettings(max_model_len=512, checks=())


def test_a_text_far_too_long_is_refused_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding it would take a hundred times its size, and the encoder would keep it."""

    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was rendered")

    async def run() -> None:
        session = new_session(LineEngine("hi"), tracking=TRACKING)
        monkeypatch.setattr(type(renderer()), "render", never)
        with pytest.raises(ContextOverflowError, match="maximum context length is 512"):
            await session.complete(ChatRequest([{"role": "user", "content": "9" * 6_000_000}]))
        assert session.tracker.context_overflow
        assert session.tracker.calls == []

    asyncio.run(run())


def test_token_ids_beyond_the_context_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        session = new_session(LineEngine("hi"), tracking=TRACKING)
        monkeypatch.setattr(type(renderer()), "decode", lambda *_, **__: pytest.fail("they were decoded"))
        with pytest.raises(ContextOverflowError):
            await session.complete(ChatRequest([], prompt_ids=[7] * 100_000))

    asyncio.run(run())
