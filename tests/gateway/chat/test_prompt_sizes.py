"""What cannot fit into the model's context is refused before time or memory goes into it."""

from __future__ import annotations

import asyncio

import pytest

from ajet.context_tracker import TrackerSettings, encoder
from ajet.context_tracker.encoder import BEGINNING, TextEncoder
from ajet.gateway.chat import episode_session
from ajet.schema.chat import ChatRequest
from ajet.schema.errors import ContextOverflowError
from support.session_parts import LineEngine, new_session, renderer

TRACKING = TrackerSettings(max_model_len=512, checks=())


def test_a_text_far_too_long_is_refused_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding it would take a hundred times its size, and the encoder would keep it."""

    async def run() -> None:
        session = new_session(LineEngine("hi"), tracking=TRACKING)
        monkeypatch.setattr(type(renderer()), "text", lambda *_, **__: pytest.fail("it was rendered"))
        with pytest.raises(ContextOverflowError, match="maximum context length is 512"):
            await session.complete(ChatRequest([{"role": "user", "content": "9" * 6_000_000}]))
        assert session.tracker.context_overflow
        assert session.tracker.calls == []

    asyncio.run(run())


def test_many_messages_are_refused_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        session = new_session(LineEngine("hi"), tracking=TRACKING)
        monkeypatch.setattr(type(renderer()), "text", lambda *_, **__: pytest.fail("they were rendered"))
        with pytest.raises(ContextOverflowError):
            await session.count_tokens(ChatRequest([{"role": "user", "content": "x"}] * 600))
        assert not session.tracker.context_overflow, "counting asks nothing"
        with pytest.raises(ContextOverflowError):
            await session.complete(ChatRequest([{"role": "user", "content": "x"}] * 600))

    asyncio.run(run())


def test_of_a_text_that_is_too_long_only_the_beginning_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        session = new_session(LineEngine("hi"), tracking=TRACKING)
        whole, encoded = TextEncoder.whole, []

        def spy(self: TextEncoder, text: str) -> list[int]:
            encoded.append(len(text))
            return whole(self, text)

        monkeypatch.setattr(TextEncoder, "whole", spy)
        with pytest.raises(ContextOverflowError, match=r"resulted in at least \d+ tokens"):
            await session.complete(ChatRequest([{"role": "user", "content": "word " * 10_000}]))
        with pytest.raises(ContextOverflowError, match=r"resulted in at least \d+ tokens"):
            await session.encode("word " * 10_000)
        assert encoded == [BEGINNING * (512 + 64)] * 2

    asyncio.run(run())


def test_what_fits_is_answered_however_many_characters_its_tokens_have(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        session = new_session(LineEngine("hi"), tracking=TRACKING)
        monkeypatch.setattr(encoder, "BEGINNING", 1)
        monkeypatch.setattr(episode_session, "LONG_TEXT", 1000)
        text = "the " * 400  # four characters to a token
        assert 0 < len(renderer().render([{"role": "user", "content": text}])) < 512
        assert (await session.complete(ChatRequest([{"role": "user", "content": text}])))[0].text == "hi"
        assert len(await session.encode(text)) < 512

    asyncio.run(run())


def test_token_ids_beyond_the_context_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        session = new_session(LineEngine("hi"), tracking=TRACKING)
        monkeypatch.setattr(type(renderer()), "decode", lambda *_, **__: pytest.fail("they were decoded"))
        with pytest.raises(ContextOverflowError):
            await session.complete(ChatRequest([], prompt_ids=[7] * 100_000))

    asyncio.run(run())
