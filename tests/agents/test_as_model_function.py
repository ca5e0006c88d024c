"""Model functions from clients, addresses and plain functions, over real sockets where there is one."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ajet.agents import ReActAgent, StopReason, as_model_function, read_trajectory
from ajet.agents.model_function import ModelReplyError
from ajet.schema.errors import ConfigError, EngineError
from support.http_server import Server

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]


def ask(function: Any, messages: Any = ASKED, **given: Any) -> Any:
    return asyncio.run(function(messages, **given))


def openai_answer(path: str, body: dict[str, Any], key: str) -> Any:
    message = {"role": "assistant", "content": f"{body['model']} {key} {body['messages'][-1]['content']}"}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    answer = {"id": "r1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return 200, {"content-type": "application/json"}, answer


def anthropic_answer(path: str, body: dict[str, Any], key: str) -> Any:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t1", "name": "calculator", "input": {"expression": "6*7"}},
    ]
    if body["messages"][-1]["content"][0]["type"] == "tool_result":
        blocks = [{"type": "text", "text": f"It is {body['messages'][-1]['content'][0]['content']}."}]
    answer = {
        "id": "m1", "type": "message", "role": "assistant", "model": "m", "content": blocks,
        "stop_reason": "tool_use" if len(blocks) > 1 else "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 2},
    }  # fmt: skip
    return 200, {"content-type": "application/json"}, answer


def test_openai_clients_and_addresses() -> None:
    import openai

    server = Server(openai_answer)
    given = {"base_url": server.url, "api_key": "k"}
    for source in (openai.AsyncOpenAI(**given), openai.OpenAI(**given)):
        reply = ask(as_model_function(source, "big"), temperature=0.5, odd_field=1)
        assert reply == {"role": "assistant", "content": "big k ?"}
        assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.finish_reason) == (7, 3, "length")
        assert reply.reply_id == "r1"
        assert server.seen[-1][1]["temperature"] == 0.5 and server.seen[-1][1]["odd_field"] == 1
    function = as_model_function(server.url, "big", api_key="secret")
    for _ in range(2):  # each on an event loop of its own
        assert ask(function)["content"] == "big secret ?"


@pytest.mark.parametrize("kind", ["Anthropic", "AsyncAnthropic"])
def test_anthropic_clients(kind: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    server = Server(anthropic_answer)
    client = getattr(anthropic, kind)(base_url=server.url.removesuffix("/v1"), api_key="k")
    agent = ReActAgent(tools=["calculator"], system_prompt="Be brief.", parallel_tool_calls=False)
    trajectory = asyncio.run(agent.run_trajectory("6*7?", as_model_function(client, "claude")))
    assert trajectory.final_response == "It is 42."
    assert trajectory.usage.input_tokens == 10
    first, second = (body for _, body, _ in server.seen)
    assert first["system"] == "Be brief." and first["tools"][0]["input_schema"]["type"] == "object"
    assert first["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
    thought, said, used = second["messages"][1]["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": "s"}  # as it came: its signature is checked
    assert said["text"] == "Let me see." and used["input"] == {"expression": "6*7"}
    assert second["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "t1", "content": "42"}]


def test_content_in_parts_reaches_anthropic_as_text_and_nothing_of_it_is_lost() -> None:
    anthropic = pytest.importorskip("anthropic")
    server = Server(anthropic_answer)
    client = anthropic.AsyncAnthropic(base_url=server.url.removesuffix("/v1"), api_key="k")
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    ask(as_model_function(client, "big"), messages)
    sent = server.seen[-1][1]
    assert sent["system"] == sent["messages"][0]["content"][0]["text"] == "Be brief."
    with pytest.raises(ConfigError, match=r"messages are text; this one holds other parts: .*image_url"):
        ask(as_model_function(client, "big"), [{"role": "user", "content": [*parts, picture]}])


def test_a_servers_content_in_parts_is_text() -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}
    answer = {"id": "r1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    server = Server(lambda *_: (200, {"content-type": "application/json"}, answer))
    assert ask(as_model_function(server.url, "m"))["content"] == "42"


@pytest.mark.parametrize(
    "answer",
    [
        "<html>a page</html>",
        {"id": "r1", "choices": []},
        {"id": "r1", "choices": [{"index": 0}]},
        {"error": {"message": "no quota"}},
        {"id": "r1", "choices": [{"index": 0, "message": {"role": "assistant", "content": [{"type": "image"}]}}]},
    ],
)
def test_what_a_server_answers_that_is_no_reply(answer: Any) -> None:
    kind = "text/html" if isinstance(answer, str) else "application/json"
    server = Server(lambda *_: (200, {"content-type": kind}, answer))
    with pytest.raises(EngineError, match=r"the model's server's answer is not a reply: "):
        ask(as_model_function(server.url, "m"))


def test_a_refusal_keeps_its_text_and_says_what_it_is() -> None:
    message = {"role": "assistant", "content": None, "refusal": "I can't help with that."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": "r1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    server = Server(lambda *_: (200, {"content-type": "application/json"}, answer))
    trajectory = asyncio.run(ReActAgent().run_trajectory("?", as_model_function(server.url, "m")))
    assert trajectory.stop_reason is StopReason.REFUSED
    assert trajectory.steps[-1].content == "I can't help with that."


def test_a_server_that_says_only_the_message(tmp_path: Path) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "42"}, "finish_reason": None}], "usage": {}}
    server = Server(lambda *_: (200, {"content-type": "application/json"}, answer))
    run = ReActAgent().run_trajectory("?", as_model_function(server.url, "m"), save_to=tmp_path / "t.jsonl")
    trajectory = asyncio.run(run)
    assert trajectory.final_response == "42" and not trajectory.usage.counted
    assert read_trajectory(tmp_path / "t.jsonl") == trajectory


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("refusal", StopReason.REFUSED),
        ("model_context_window_exceeded", StopReason.REPLY_CUT),
        ("end_turn", StopReason.ANSWER),
    ],
)
def test_how_anthropics_replies_end(said: str, reason: StopReason) -> None:
    anthropic = pytest.importorskip("anthropic")

    def answer(path: str, body: dict[str, Any], key: str) -> Any:
        status, headers, reply = anthropic_answer(path, body, key)
        return status, headers, {**reply, "content": [{"type": "text", "text": "Well,"}], "stop_reason": said}

    client = anthropic.AsyncAnthropic(base_url=Server(answer).url.removesuffix("/v1"), api_key="k")
    trajectory = asyncio.run(ReActAgent().run_trajectory("?", as_model_function(client, "claude")))
    assert trajectory.stop_reason is reason


def test_blocking_functions_block_nobody_else() -> None:
    both = threading.Barrier(2, timeout=10)

    def model(messages: Any) -> str:
        both.wait()
        return "ok"

    async def main() -> list[Any]:
        function = as_model_function(model)
        return await asyncio.gather(function(ASKED), function(ASKED))

    assert [reply["content"] for reply in asyncio.run(main())] == ["ok", "ok"]


def test_a_blocking_function_may_wrap_an_async_one() -> None:
    async def model(messages: Any) -> str:
        return "ok"

    @functools.wraps(model)
    def blocking(messages: Any) -> Any:
        return asyncio.run(model(messages))

    assert ask(as_model_function(blocking))["content"] == "ok"


def test_functions_get_what_they_take() -> None:
    def only_messages(messages: Any) -> str:
        return "a"

    async def some(messages: Any, *, temperature: float = 1.0) -> dict[str, Any]:
        return {"content": str(temperature), "usage": {"prompt_tokens": 1, "completion_tokens": 2}}

    class Object:
        def __call__(self, messages: Any, max_tokens: int = 0, **rest: Any) -> Any:
            return type("Answer", (), {"text": f"{max_tokens} {sorted(rest)}"})()

    given = {"tools": [{"type": "function"}], "temperature": 0.3, "max_tokens": 9}
    assert ask(as_model_function(only_messages), **given)["content"] == "a"
    reply = ask(as_model_function(some), **given)
    assert reply == {"role": "assistant", "content": "0.3"} and reply.usage.output_tokens == 2
    assert ask(as_model_function(Object()), **given)["content"] == "9 ['temperature', 'tools']"


def test_content_in_parts_is_text() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    assert ask(as_model_function(lambda messages: {"content": parts}))["content"] == "42"


@pytest.mark.parametrize(
    "reply",
    [None, 42, {"text": "x"}, {"content": 7}, {"content": [{"type": "image"}]}, {"content": "", "tool_calls": "x"}, []],
)
def test_what_is_no_reply_is_not_taken_for_one(reply: Any) -> None:
    with pytest.raises(ModelReplyError, match=r"reply|returned"):
        ask(as_model_function(lambda messages: reply))


def test_what_is_no_model() -> None:
    for source, says in ((42, "int"), ("localhost:8000", "not a URL"), ("http://localhost/v1", "name of the model")):
        with pytest.raises(ConfigError, match=says):
            as_model_function(source)


def test_a_server_that_is_down() -> None:
    import openai

    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        asyncio.run(ReActAgent().run_trajectory("?", as_model_function(client, "m")))
    failed = asyncio.run(ReActAgent().run_trajectory("?", as_model_function(client, "m"), raise_errors=False))
    assert failed.failure is not None and "(http://127.0.0.1:9/v1/chat/completions)" in failed.failure.message


def test_broken_arguments_still_make_a_conversation() -> None:
    from ajet.agents.model_function import _conversation

    broken = {"id": "1", "function": {"name": "f", "arguments": "{not json"}}
    made = _conversation([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [broken]},
        {"role": "tool", "tool_call_id": "1", "content": "no"},
        {"role": "user", "content": "b"},
    ])  # fmt: skip
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant", "user"]
    assert made["messages"][1]["content"][0]["input"] == {"arguments": "{not json"}
    assert json.dumps(made)
