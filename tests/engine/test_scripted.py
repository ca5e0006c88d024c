"""The scripted engine: says what it was told, session by session, through a real tokenizer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ajet.engine.base import Engine
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedCall, ScriptedEngine, read_replies
from ajet.schema.chat import GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import ConfigError, ContextOverflowError, EngineError, InvalidRequestError

TOKENIZER = ModelSource.resolve("tiny:qwen2").tokenizer()


def ask(engine: Engine, session: str = "s", prompt: str = "hello", **sampling: object):  # type: ignore[no-untyped-def]
    request = GenerateRequest(TOKENIZER.encode(prompt), Sampling(**sampling), session_id=session)  # type: ignore[arg-type]
    return asyncio.run(engine.generate(request))


def test_each_session_hears_the_replies_in_order_and_then_the_last_again() -> None:
    engine = ScriptedEngine(["one", "two"], TOKENIZER)
    heard = [TOKENIZER.decode(ask(engine, session).token_ids) for session in "aabba"]
    assert [text.removesuffix("<|im_end|>") for text in heard] == ["one", "two", "one", "two", "two"]


def test_a_message_is_written_as_the_template_writes_it() -> None:
    call = {"function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
    engine = ScriptedEngine([{"content": "", "tool_calls": [call]}], lambda: TOKENIZER)
    text = TOKENIZER.decode(ask(engine).token_ids)
    expected = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call><|im_end|>'
    assert text == expected


def test_a_function_sees_the_prompt() -> None:
    def reply(call: ScriptedCall) -> str:
        return f"{call.prompt} {call.index} {call.session_id}"

    engine = ScriptedEngine(reply, TOKENIZER)
    assert TOKENIZER.decode(ask(engine, "x", "what?").token_ids) == "what? 0 x<|im_end|>"


def test_it_ends_as_an_engine_ends() -> None:
    engine = ScriptedEngine(["one two three"], TOKENIZER)
    cut = ask(engine, max_tokens=1)
    assert (cut.finish_reason, len(cut.token_ids), cut.logprobs) == ("length", 1, [0.0])
    stopped = ask(engine, stop=("two",))
    assert (stopped.finish_reason, stopped.stopped_by) == ("stop", "two")
    assert "two" in TOKENIZER.decode(stopped.token_ids)
    assert ask(engine).stopped_by == TOKENIZER.eos_token_id


def test_it_refuses_as_an_engine_refuses() -> None:
    engine = ScriptedEngine(["x"], TOKENIZER, max_model_len=8)
    with pytest.raises(InvalidRequestError, match="temperature"):
        ask(engine, temperature=-1.0)
    with pytest.raises(ContextOverflowError, match="max_model_len=8"):
        ask(engine, prompt="1234567890")


def test_versions_pause_and_close() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(["x"], TOKENIZER)
        await engine.load_weights(None, 7)
        await engine.pause()
        chunks: list[TokenChunk] = []
        held = asyncio.create_task(engine.generate(GenerateRequest([1], Sampling()), chunks.append))
        await asyncio.sleep(0.01)
        assert not held.done()
        await engine.resume()
        completion = await held
        assert completion.versions == [(0, 7)]
        assert [token for chunk in chunks for token in chunk.token_ids] == completion.token_ids
        await engine.aclose()
        with pytest.raises(EngineError):
            await engine.generate(GenerateRequest([1], Sampling()))

    asyncio.run(scenario())


def test_replies_are_read_from_yaml_and_json(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("- hello\n- {content: hi}\n")
    (tmp_path / "r.json").write_text(json.dumps(["hello"]))
    assert read_replies(tmp_path / "r.yaml") == ["hello", {"content": "hi"}]
    assert read_replies(tmp_path / "r.json") == ["hello"]


@pytest.mark.parametrize("content", ["a: 1", "[]", "[", "!!python/name:os.system"])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        read_replies(tmp_path / "r.yaml")


def test_an_unquoted_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("- hello\n- 48\n")
    with pytest.raises(ConfigError, match=r"r\.yaml: reply 2 is 48, expected a text \(put it in quotes\)"):
        read_replies(tmp_path / "r.yaml")
