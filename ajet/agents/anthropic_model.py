"""`AnthropicModelFunction`: a model that Anthropic's client reaches, asked and answering in OpenAI's form."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from typing import Any

from ajet.agents.reply import ModelMessage
from ajet.schema.trajectory import Usage

Message = dict[str, Any]
DEFAULT_MAX_TOKENS = 4096
"""Anthropic's API asks for a maximum."""
_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length", None: "stop"}


class AnthropicModelFunction:
    """A model function over `anthropic.Anthropic` or `anthropic.AsyncAnthropic`."""

    takes_tools = True

    def __init__(self, client: Any, model: str) -> None:
        self.model = model
        self._client = client

    async def __call__(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> ModelMessage:
        request = {"model": self.model, **_conversation(messages), **_sampling(sampling, bool(tools))}
        if tools:
            request["tools"] = [_tool(tool) for tool in tools]
        create = self._client.messages.create
        if inspect.iscoroutinefunction(inspect.unwrap(create)):
            return _message(await create(**request))
        reply = await asyncio.to_thread(create, **request)
        return _message(await reply if inspect.isawaitable(reply) else reply)


def _sampling(given: dict[str, Any], has_tools: bool) -> dict[str, Any]:
    given = {key: value for key, value in given.items() if value is not None}
    request: dict[str, Any] = {}
    request["max_tokens"] = given.pop("max_completion_tokens", None) or given.pop("max_tokens", DEFAULT_MAX_TOKENS)
    given.pop("max_tokens", None)
    if stop := given.pop("stop", None):
        request["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if given.pop("parallel_tool_calls", True) is False and has_tools:
        request["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    if given.get("tool_choice") == "none":
        request["tool_choice"] = {"type": given.pop("tool_choice")}
    return {**request, **given}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    made = {"name": function["name"], "input_schema": function.get("parameters") or {"type": "object"}}
    return {**made, **({"description": function["description"]} if function.get("description") else {})}


def _conversation(messages: Sequence[Message]) -> dict[str, Any]:
    """`system` and `messages`. Tool results are blocks of a user message; neighbours of one role become one message."""
    system = [str(message["content"]) for message in messages if message["role"] == "system"]
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system":
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = _blocks(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return {"messages": turns, **({"system": "\n\n".join(system)} if system else {})}


def _blocks(message: Message) -> list[dict[str, Any]]:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
    blocks: list[dict[str, Any]] = list(message.get("anthropic_thinking") or ())  # must come back as it was
    if text.strip():  # the API refuses empty text
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        blocks.append({
            "type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"]),
        })  # fmt: skip
    return blocks


def _input(arguments: Any) -> Any:
    """The arguments as an object, which the API insists on: a model's broken JSON goes back as text within one."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _message(reply: Any) -> ModelMessage:
    texts, thinking, calls = [], [], []
    for block in reply.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type in ("thinking", "redacted_thinking"):
            thinking.append(block)
    message = ModelMessage(role="assistant", content="".join(texts))
    if thinking:
        message["reasoning_content"] = "".join(getattr(block, "thinking", "") for block in thinking)
        message["anthropic_thinking"] = [block.model_dump(exclude_none=True) for block in thinking]
    if calls:
        message["tool_calls"] = calls
    message.usage = Usage(reply.usage.input_tokens, reply.usage.output_tokens)
    message.finish_reason = _FINISH.get(reply.stop_reason, reply.stop_reason)
    message.reply_id = reply.id
    return message
