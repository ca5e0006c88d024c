"""`POST /v1/messages`: Anthropic's protocol, complete or streamed, over the same sessions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

from ajet.gateway import protocol
from ajet.gateway.chat import CallPiece, ReplyDelta
from ajet.gateway.protocol import (
    BadField,
    Caller,
    Event,
    ReplyStream,
    of_type,
    read_model,
    read_sampling,
    read_tool_choice,
    refuse_unsupported,
    unreadable_call,
)
from ajet.schema.chat import DEFAULT_TARGET, ChatReply, ChatRequest, Message, Tool
from ajet.schema.errors import ModelCallError, UnsupportedContentError
from ajet.system.http_messages import Answer, event_stream, json_answer, server_sent_event

# ---------------------------------------------------------------- the request

STAND_INS = ("[System: Empty message content sanitised to satisfy protocol]",)
"""What clients write beside tool calls where a reply had no text: LiteLLM does, as a streamed reply's text is ""."""


def read_request(body: dict[str, Any], caller: Caller) -> tuple[ChatRequest, str]:
    """The chat request, and the model's name as the client wrote it."""
    refuse_unsupported(body)
    asked = read_model(body, caller)
    if body.get("max_tokens") is None:
        raise BadField("max_tokens", "max_tokens is required")
    tools = _tools(protocol.array(body, "tools"))
    messages = _system(body.get("system")) + _messages(protocol.array(body, "messages"))
    given = {key: body.get(key) for key in ("max_tokens", "temperature", "top_p", "top_k")}
    sampling = read_sampling(given, caller.session.settings.default_sampling)
    request = ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(body.get("tool_choice"), tools),
        sampling=replace(sampling, stop=protocol.stops(body, "stop_sequences")),
        parallel_tool_calls=not protocol.flag(protocol.mapping(body, "tool_choice"), "disable_parallel_tool_use"),
        agent=asked.agent,
        target=caller.target or DEFAULT_TARGET,
        trainable=asked.trainable,
        response_format=_response_format(body),
    )
    return request, asked.name


def _response_format(body: dict[str, Any]) -> dict[str, Any] | None:
    """`output_config.format`, or `output_format` as it was called before, as chat's `response_format`."""
    key, given = "output_config.format", protocol.mapping(protocol.mapping(body, "output_config"), "format")
    if not given:
        key, given = "output_format", protocol.mapping(body, "output_format")
    if not given:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise BadField(key, f"{key} must be {{type: json_schema, schema: an object}}")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


def _system(value: Any) -> list[Message]:
    if value is None or value == "" or value == []:
        return []
    return [{"role": "system", "content": _text(value, "system")}]


def _text(value: Any, where: str) -> str:
    """A string, or a list of text blocks."""
    if isinstance(value, str):
        return value
    blocks = of_type(value, where, list, "a string or a list of blocks")
    return "".join(_block_text(block, f"{where}[{index}]") for index, block in enumerate(blocks))


def _block_text(block: Any, where: str) -> str:
    if of_type(block, where, dict, "an object").get("type") != "text":
        raise UnsupportedContentError(f"{where}: only text is supported, not {block.get('type')!r:.40}")
    return of_type(block.get("text"), f"{where}.text", str, "a string")


def _messages(values: list[Any]) -> list[Message]:
    if not values:
        raise BadField("messages", "messages must hold at least one message")
    messages: list[Message] = []
    for index, value in enumerate(values):
        where = f"messages[{index}]"
        value = of_type(value, where, dict, "an object")
        role, content = value.get("role"), value.get("content")
        if role == "user":
            messages += _user(content, where)
        elif role == "assistant":
            messages.append(_assistant(content, where))
        elif role == "system":
            messages.append({"role": "system", "content": _text(content, f"{where}.content")})
        else:
            raise BadField(f"{where}.role", f"{where}.role must be user or assistant, not {role!r:.40}")
    if messages[-1]["role"] == "assistant":
        raise BadField("messages", "the last message must be the user's: prefilling the reply is not supported")
    return messages


def _user(content: Any, where: str) -> list[Message]:
    """Text and tool results, each in its own message, in order."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Message] = []
    for index, block in enumerate(of_type(content, f"{where}.content", list, "a string or a list of blocks")):
        place = f"{where}.content[{index}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            call_id = of_type(block.get("tool_use_id"), f"{place}.tool_use_id", str, "a string")
            text = _text(block.get("content") or "", f"{place}.content")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            continue
        text = _block_text(block, place)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(text)
        else:
            messages.append({"role": "user", "content": [text]})
    for message in messages:
        if message["role"] == "user":
            message["content"] = "".join(message["content"])
    return messages or [{"role": "user", "content": ""}]


def _assistant(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    blocks = of_type(content, f"{where}.content", list, "a string or a list of blocks")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        block_type = block.get("type") if isinstance(block, dict) else None
        if block_type == "tool_use":
            name, call_id, given = block.get("name"), block.get("id"), block.get("input")
            if not (isinstance(name, str) and isinstance(call_id, str) and isinstance(given, dict)):
                raise BadField(place, f"{place} needs a name and an id (strings) and an input (object)")
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": call_id, "type": "function", "function": function})
        elif block_type == "thinking":
            reasoning.append(protocol.text(block, "thinking"))
        elif block_type != "redacted_thinking":
            texts.append(_block_text(block, place))
    if calls:  # a call needs no text beside it, and the reply that is repeated here had none
        texts = [text for text in texts if text not in STAND_INS]
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _tools(values: list[Any]) -> list[Tool]:
    tools = []
    for index, value in enumerate(values):
        where = f"tools[{index}]"
        value = of_type(value, where, dict, "an object")
        if value.get("type", "custom") not in ("custom", None):
            raise BadField(f"{where}.type", f"{where}: only custom tools are supported, not {value['type']!r:.40}")
        name, schema = value.get("name"), value.get("input_schema", {})
        if not isinstance(name, str) or not name or not isinstance(schema, dict):
            raise BadField(where, f"{where} needs a name and an input_schema")
        function: dict[str, Any] = {"name": name}
        if description := protocol.text(value, "description"):
            function["description"] = description
        tools.append({"type": "function", "function": {**function, "parameters": schema}})
    return tools


def _tool_choice(value: Any, tools: list[Tool]) -> Literal["auto", "none", "required"] | Tool:
    choice = value.get("type") if isinstance(value, dict) else None
    if choice == "tool":
        return read_tool_choice({"name": protocol.text(value, "name")}, tools).choice
    if value is None or choice in ("auto", "any", "none"):
        return read_tool_choice(choice, tools).choice
    raise BadField("tool_choice", 'tool_choice must be {"type": "auto" | "any" | "tool" | "none"}')


# ---------------------------------------------------------------- the answer

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def anthropic_error_body(error: ModelCallError) -> dict[str, Any]:
    """Anthropic's shape; `code` is ours, for clients that want more detail."""
    status = error.http_status
    error_type = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": error_type, "message": str(error), "code": error.code}}


async def count_tokens(body: dict[str, Any], caller: Caller) -> Answer:
    """`POST /v1/messages/count_tokens`: the length of the prompt. Nothing is sampled or recorded."""
    request, _ = read_request({"max_tokens": 1, **body}, caller)
    return json_answer({"input_tokens": await caller.session.count_tokens(request)})


async def messages(body: dict[str, Any], caller: Caller) -> Answer:
    """Answer one request. Raises `ModelCallError` until something has been sent."""
    request, model = read_request(body, caller)
    if protocol.flag(body, "stream"):
        stream = ReplyStream(request, caller.session)
        first = await stream.first()
        return event_stream(message_events(model, stream, first), stream.close)
    token_ids = protocol.flag(body, "return_token_ids")
    (reply,) = await caller.session.complete(request)
    answer = {**_head(reply.call_id, model), "content": _blocks(reply), **_ending(reply), "usage": _usage(reply)}
    if token_ids:
        answer |= {"prompt_token_ids": reply.prompt_ids, "token_ids": reply.completion.token_ids}
    return json_answer(answer | _malformed(reply))


def _malformed(reply: ChatReply) -> dict[str, Any]:
    """What was wrong with the reply, as in the other protocols."""
    return {"malformed": reply.malformed} if reply.malformed else {}


def _head(call_id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model}


def _blocks(reply: ChatReply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    return blocks + [_tool_use(call) for call in message.get("tool_calls", [])]


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        given = json.loads(function["arguments"])
    except ValueError:  # from a server that returns no token ids: cut short, or not JSON
        given = {}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _ending(reply: ChatReply) -> dict[str, Any]:
    stopped_by = reply.completion.stopped_by
    if reply.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(reply: ChatReply) -> dict[str, Any]:
    cached, (prompt, sampled) = reply.completion.cached_prompt_tokens, reply.spent
    return {
        "input_tokens": prompt - cached,
        "output_tokens": sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


# ---------------------------------------------------------------- streaming

_NO_USAGE = {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


async def message_events(model: str, stream: ReplyStream, event: Event) -> AsyncIterator[bytes]:
    """Anthropic's events: content blocks are opened, filled and closed one after another."""
    blocks = _OpenBlocks()
    assert not isinstance(event, ModelCallError)
    call_id = event.call_id if isinstance(event, ReplyDelta) else event[0].call_id
    start = {**_head(call_id, model), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _NO_USAGE}
    yield _event({"type": "message_start", "message": start})
    while isinstance(event, ReplyDelta):
        delta = event.delta
        if delta.reasoning:
            yield blocks.add("thinking", {"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield blocks.add("text", {"type": "text_delta", "text": delta.content})
        if delta.call is not None:
            yield blocks.tool_use(delta.call)
        event = await stream.next()
    yield blocks.close()
    if isinstance(event, ModelCallError):
        yield _event(anthropic_error_body(event))
        return
    (reply,) = event
    yield _event({"type": "message_delta", "delta": _ending(reply), "usage": _usage(reply), **_malformed(reply)})
    yield _event({"type": "message_stop"})


class _OpenBlocks:
    """Which content block is open, and its index."""

    def __init__(self) -> None:
        self._kind = ""
        self._index = -1

    def add(self, kind: str, delta: dict[str, Any]) -> bytes:
        """The events that add to a block of this kind; they open one if needed."""
        events = b"" if kind == self._kind else self._open(kind, {"type": kind, kind: ""})
        return events + _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def tool_use(self, piece: CallPiece) -> bytes:
        """The events of a piece of a tool call."""
        events = b""
        if piece.begins:
            events = self._open("tool_use", {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        if piece.arguments:
            events += self.add("tool_use", {"type": "input_json_delta", "partial_json": piece.arguments})
        if piece.failed is not None:
            events += self.close(error=unreadable_call(piece.failed))
        return events

    def close(self, **more: Any) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event({"type": "content_block_stop", "index": self._index, **more})

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self.close()
        self._kind, self._index = kind, self._index + 1
        if kind == "thinking":
            block["signature"] = ""
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + _event(start)


def _event(value: dict[str, Any]) -> bytes:
    return server_sent_event(value, value["type"])
