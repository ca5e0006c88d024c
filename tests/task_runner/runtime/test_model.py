"""Loading a model, and the sessions over it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ajet.config import make_config
from ajet.context_tracker.template_probe import NotStable
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedEngine
from ajet.engine.tiny_models import END_OF_TEXT, MESSAGE_END, token_id
from ajet.schema.chat import ChatRequest
from ajet.schema.errors import ConfigError
from ajet.task_runner.model import ModelLoader, load_model

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


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_each_token_that_ends_generate_ends_a_reply(tmp_path: Path, file: str) -> None:
    """As Qwen and Llama name two: one that the template writes, and one that must never stand inside a prompt."""
    folder = shutil.copytree(ModelSource.resolve("tiny:qwen2").path, tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    there = folder / file
    written, other = token_id(MESSAGE_END), token_id(END_OF_TEXT)
    settings = json.loads(there.read_text()) if there.is_file() else {}
    there.write_text(json.dumps({**settings, "eos_token_id": [written, other]}))
    renderer = load_model(make_config({"model.path": str(folder)}), scripted).renderer
    assert renderer.end_ids == {written, other}
    after = f"{MESSAGE_END}\n<|im_start|>user\nAnd?"
    assert isinstance(renderer.closing_ids(after, [*renderer.encoder.continuation("Yes."), other]), NotStable)
    assert not isinstance(renderer.closing_ids(after, renderer.encoder.continuation("Yes.")), NotStable)


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
