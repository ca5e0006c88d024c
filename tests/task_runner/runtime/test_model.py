"""Loading a model, and the sessions over it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ajet.config import make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedEngine
from ajet.schema.chat import ChatRequest
from ajet.schema.errors import ConfigError
from ajet.task_runner.runtime import ModelLoader, load_model

CONFIG = make_config({"model.path": "tiny:qwen2"})


def scripted(_config: Any) -> ScriptedEngine:
    return ScriptedEngine(["hello"], lambda: ModelSource.resolve("tiny:qwen2").tokenizer(), max_model_len=1000)


def test_a_conversation_is_answered_and_not_trained() -> None:
    async def main() -> None:
        session = load_model(CONFIG, scripted).open_conversation(1000)
        (reply,) = await session.complete(ChatRequest([{"role": "user", "content": "hi"}]))
        assert reply.message["content"] == "hello"
        assert not session.settings.training

    asyncio.run(main())


def test_whatever_a_library_raises_names_the_model() -> None:
    def broken(_config: Any) -> Any:
        raise ZeroDivisionError("in a library")

    with pytest.raises(ConfigError, match=r"ajet.model.path: 'tiny:qwen2' can't be loaded: ZeroDivisionError: in a"):
        load_model(CONFIG, broken)


def test_the_engine_waits_for_the_users_code() -> None:
    made = []
    loader = ModelLoader(CONFIG, lambda config: made.append(1) or scripted(config))  # type: ignore[func-returns-value]
    loader.start()
    with pytest.raises(TimeoutError):
        loader.loaded.result(0.5)
    assert not made
    loader.user_code_imported()
    assert loader.loaded.result(30).engine.capabilities.name and made


def test_an_engine_that_can_not_load_is_noted() -> None:
    class Broken(ScriptedEngine):
        async def ready(self) -> None:
            raise MemoryError("no room")

    loader = ModelLoader(CONFIG, lambda _: Broken(["x"], lambda: None, max_model_len=10))
    loader.user_code_imported()
    loader.start()
    loader.loaded.result(30)
    asyncio.run(loader.watch_engine())
    assert "could not load 'tiny:qwen2': MemoryError: no room" in str(loader.engine_error)
