"""`POST /v1/chat/completions`: OpenAI's chat protocol, complete or streamed."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, cast

from ajet.gateway import protocol
from ajet.gateway.chat import CallPiece, EpisodeSession, ReplyDelta
from ajet.gateway.protocol import (
    BadField,
    Caller,
    Event,
    ReplyStream,
    json_body,
    of_type,
    read_model,
    refuse_unsupported,
)
from ajet.schema.chat import (
    DEFAULT_TARGET,
    ChatReply,
    ChatRequest,
    Completion,
    FixedTools,
    JsonMessages,
    Message,
    Sampling,
    Tool,
)
from ajet.schema.errors import InvalidRequestError, ModelCallError
from ajet.system.http_messages import (
    Answer,
    InvalidBodyError,
    event_stream,
    json_answer,
    json_members,
    json_value,
    kind,
    server_sent_event,
)

_WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


class ToolChoice(NamedTuple):
    """Which tools the reply should call."""

    choice: Literal["auto", "none", "required"] | Tool = "auto"
    allowed: tuple[str, ...] | None = None
    """The only tools that may be called; None: all on offer."""


def read_tool_choice(value: Any, tools: list[Tool]) -> ToolChoice:
    """`auto`, `none`, `required` (or `any`), one function, or `allowed_tools`."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        return ToolChoice(_word(value, tools))
    choice = value.get("type") if isinstance(value, dict) else None
    if choice == "allowed_tools":
        nested = value.get("allowed_tools")
        return _allowed(nested if isinstance(nested, dict) else value, tools)
    if choice == "function" or (isinstance(value, dict) and choice is None):
        return ToolChoice({"type": "function", "function": {"name": _name(value, tools)}})
    if isinstance(value, dict):
        raise BadField("tool_choice", f"tool_choice of type {choice!r:.40} is not supported: only functions are")
    raise BadField("tool_choice", f"tool_choice must be a string or an object, not {kind(value)}")


def _word(value: Any, tools: list[Tool]) -> Literal["auto", "none", "required"]:
    word = _WORDS.get(value) if isinstance(value, str) else None
    if word is None:
        raise BadField("tool_choice", f"tool_choice must be auto, none, required or a function, not {value!r:.40}")
    if word == "required" and not tools:
        raise BadField("tool_choice", f"tool_choice is {value!r} but no tools are given")
    return cast(Literal["auto", "none", "required"], word)


def _allowed(value: dict[str, Any], tools: list[Tool]) -> ToolChoice:
    named = value.get("tools")
    if not isinstance(named, list) or not all(isinstance(tool, dict) for tool in named):
        raise BadField("tool_choice", "tool_choice of type 'allowed_tools' needs a list of tools")
    names = tuple(_name(tool, tools) for tool in named)
    return ToolChoice(_word(value.get("mode", "auto"), tools), names)


def _name(value: dict[str, Any], tools: list[Tool]) -> str:
    """The function's name, beside `type` or inside `function`."""
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadField("tool_choice", 'tool_choice must be a string or {"type": "function", "function": {"name": …}}')
    if name not in {tool["function"]["name"] for tool in tools}:
        raise BadField("tool_choice", f"tool_choice names {name!r:.60}, which is not among the tools")
    return name


MAX_CHOICES = 64
MAX_STOPS = 16


@dataclass(slots=True)
class ChatCall:
    """A chat request, and the form its answer should take."""

    request: ChatRequest
    model: str
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False


# ---------------------------------------------------------------- the request

_EMPTY = re.compile(rb"\[\s*\]")


def chat_body(body: bytes, most_nodes: int) -> dict[str, Any]:
    """A request's JSON object. Its messages are decoded when the tracker needs them, which are usually the new ones
    alone; its tools are read once for all requests that repeat them."""
    members = json_members(body)
    if members is None:
        return json_body(body, most_nodes)
    decode = partial(_decode, most_nodes=most_nodes)
    messages, tools = members.pop("messages", b"null"), members.pop("tools", b"null")
    read = {name: decode(source) for name, source in members.items()}
    lazy = messages.startswith(b"[") and not _EMPTY.fullmatch(messages)
    read["messages"] = JsonMessages(messages, decode) if lazy else decode(messages)
    read["tools"] = _fixed_tools(tools, most_nodes) if tools.startswith(b"[") else decode(tools)
    return read


def _decode(source: bytes, most_nodes: int) -> Any:
    try:
        return json_value(source, most_nodes)
    except InvalidBodyError as error:
        raise BadField("body", str(error)) from None


@lru_cache(maxsize=64)
def _fixed_tools(source: bytes, most_nodes: int) -> FixedTools:
    return FixedTools(read_tools(_decode(source, most_nodes)))


def read_chat_call(body: dict[str, Any], caller: Caller) -> ChatCall:
    """Check a request's body."""
    choices = protocol.integer(body, "n", 1, MAX_CHOICES) or 1
    refuse_unsupported(body, choices)
    if protocol.array(body, "modalities") not in ([], ["text"]):
        raise BadField("modalities", "only text is supported")
    asked = read_model(body, caller)
    tools = protocol.array(body, "tools")
    tools = tools if isinstance(tools, FixedTools) else read_tools(tools)
    choice = read_tool_choice(body.get("tool_choice"), tools)
    logprobs = protocol.flag(body, "logprobs")
    top_logprobs = protocol.integer(body, "top_logprobs", 0, 20) or 0
    if top_logprobs and not logprobs:
        raise BadField("top_logprobs", "top_logprobs takes effect only with logprobs: true")
    messages = body.get("messages")
    request = ChatRequest(
        messages=messages if isinstance(messages, JsonMessages) else read_messages(protocol.array(body, "messages")),
        tools=tools,
        tool_choice=choice.choice,
        allowed_tools=choice.allowed,
        parallel_tool_calls=protocol.flag(body, "parallel_tool_calls", True),
        sampling=read_sampling(body, caller.session.settings.default_sampling),
        agent=asked.agent,
        target=caller.target or DEFAULT_TARGET,
        trainable=asked.trainable,
        n=choices,
        top_logprobs=top_logprobs,
        response_format=protocol.mapping(body, "response_format") or None,
        chat_template_kwargs=protocol.mapping(body, "chat_template_kwargs"),
    )
    return ChatCall(
        request=request,
        model=asked.name,
        stream=protocol.flag(body, "stream"),
        include_usage=protocol.flag(protocol.mapping(body, "stream_options"), "include_usage"),
        logprobs=logprobs,
        token_ids=protocol.flag(body, "return_token_ids"),
    )


def read_sampling(body: dict[str, Any], default: Sampling) -> Sampling:
    """The client's sampling parameters, with `default` for those it leaves out."""
    limits = (protocol.integer(body, key, 1, 10**9) for key in ("max_tokens", "max_completion_tokens"))
    stop_ids = protocol.array(body, "stop_token_ids")
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in stop_ids):
        raise BadField("stop_token_ids", "stop_token_ids must be a list of token ids")
    top_k = protocol.integer(body, "top_k", -1, 10**9)
    return Sampling(
        temperature=protocol.number(body, "temperature", default.temperature, 0.0, 2.0),
        top_p=protocol.number(body, "top_p", default.top_p, 1e-6, 1.0),
        top_k=default.top_k if top_k is None else top_k,
        min_p=protocol.number(body, "min_p", default.min_p, 0.0, 1.0),
        presence_penalty=protocol.number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=protocol.number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=protocol.number(body, "repetition_penalty", 1.0, 0.01, 10.0),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=protocol.strings(body, "stop", MAX_STOPS),
        stop_token_ids=tuple(stop_ids),
        seed=protocol.integer(body, "seed", -(2**63), 2**63 - 1),
        ignore_eos=protocol.flag(body, "ignore_eos"),
    )


def read_messages(values: list[Any], key: str = "messages") -> list[Message]:
    """The messages as received; the tracker checks their content when it reads them."""
    if not values:
        raise BadField(key, f"{key} must hold at least one message")
    for index, value in enumerate(values):
        of_type(value, f"{key}[{index}]", dict, "an object")
    return values


def read_tools(values: list[Any]) -> list[Tool]:
    """The tools on offer."""
    tools = []
    for index, value in enumerate(values):
        where = f"tools[{index}]"
        value = of_type(value, where, dict, "an object")
        if value.get("type", "function") != "function":
            raise BadField(f"{where}.type", f"{where}.type must be 'function', not {value.get('type')!r:.40}")
        function = value.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadField(f"{where}.function", f"{where}.function must be an object with a name")
        if not isinstance(function.get("description", ""), str | None):
            raise BadField(f"{where}.function.description", f"{where}.function.description must be a string")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise BadField(f"{where}.function.parameters", f"{where}.function.parameters must be a JSON schema")
        tools.append({"type": "function", "function": function})
    return tools


# ---------------------------------------------------------------- the answer


_FIELD = re.compile(r"(messages|input|response_format|tools)[\w.\[\]]*")
"""A message about a field that is read beyond the gateway begins with its name."""


def openai_error_body(error: ModelCallError) -> dict[str, Any]:
    named = _FIELD.match(str(error)) if isinstance(error, InvalidRequestError) else None
    return {
        "message": str(error),
        "type": error.error_type,
        "param": getattr(error, "param", None) or (named[0].rstrip(".") if named else None),
        "code": error.code,
    }


async def chat_completions(body: dict[str, Any], caller: Caller) -> Answer:
    """Answer one request. Raises `ModelCallError` until something has been sent."""
    call = read_chat_call(body, caller)
    if call.stream:
        stream = ReplyStream(call.request, caller.session)
        first = await stream.first()
        return event_stream(chat_chunks(call, caller.session, stream, first), stream.close)
    replies = await caller.session.complete(call.request)
    return json_answer(chat_completion(call, replies, caller.session))


def completion_id(call_id: str) -> str:
    return f"chatcmpl-{call_id}"


def chat_completion(call: ChatCall, replies: list[ChatReply], session: EpisodeSession) -> dict[str, Any]:
    """The complete answer. Its `id` is the first choice's call; each choice has its own `call_id`."""
    answer: dict[str, Any] = {
        "id": completion_id(replies[0].call_id),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [_choice(call, index, reply, session) for index, reply in enumerate(replies)],
        "usage": usage(replies),
    }
    if call.token_ids:
        answer["prompt_token_ids"] = replies[0].prompt_ids
    return answer


def _choice(call: ChatCall, index: int, reply: ChatReply, session: EpisodeSession) -> dict[str, Any]:
    completion = reply.completion
    choice: dict[str, Any] = {
        "index": index,
        "message": message_of(reply),
        "logprobs": logprobs_of(completion, session) if call.logprobs else None,
        "finish_reason": reply.finish_reason,
        "call_id": reply.call_id,
    }
    if call.token_ids:
        choice["token_ids"] = completion.token_ids
    if reply.malformed:
        choice["malformed"] = reply.malformed
    return choice


def message_of(reply: ChatReply) -> dict[str, Any]:
    """The reply's message. As with OpenAI, content is null when there are only tool calls."""
    message = {**reply.message, "refusal": None}
    if not message.get("content") and message.get("tool_calls"):
        message["content"] = None
    return message


def usage(replies: list[ChatReply]) -> dict[str, Any]:
    prompt = replies[0].spent[0]
    sampled = sum(reply.spent[1] for reply in replies)
    cached = max(reply.completion.cached_prompt_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def logprobs_of(completion: Completion, session: EpisodeSession) -> dict[str, Any]:
    """The log-probabilities of a completion's tokens, in OpenAI's form."""
    content = []
    for index in range(len(completion.token_ids)):
        top = completion.top_logprobs[index] if completion.top_logprobs else []
        entry = token_entry(completion.token_ids[index], completion.logprobs[index], session)
        content.append({**entry, "top_logprobs": [token_entry(token, value, session) for token, value in top]})
    return {"content": content, "refusal": None}


def token_entry(token_id: int, logprob: float, session: EpisodeSession) -> dict[str, Any]:
    """One token and its log-probability."""
    text = session.decode_token(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


# ---------------------------------------------------------------- streaming


async def chat_chunks(
    call: ChatCall, session: EpisodeSession, stream: ReplyStream, event: Event
) -> AsyncIterator[bytes]:
    """Server-sent events, beginning with `event`. The last chunk of a choice carries its log-probabilities and ids."""
    head: dict[str, Any] = {
        "id": "",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": call.model,
    }
    begun: set[int] = set()
    """The choices that have begun."""

    def chunk(choice: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choices = [{"index": choice, "delta": delta, "finish_reason": finish, **more}]
        return server_sent_event({**head, "choices": choices})

    while isinstance(event, ReplyDelta):
        delta: dict[str, Any] = {}
        if event.choice not in begun:
            head["id"] = head["id"] or completion_id(event.call_id)
            begun.add(event.choice)
            delta = {"role": "assistant", "content": ""}
        if event.delta.content:
            delta["content"] = event.delta.content
        if event.delta.reasoning:
            delta["reasoning_content"] = event.delta.reasoning
        if event.delta.call is not None:
            delta["tool_calls"] = [call_piece(event.delta.call)]
        yield chunk(event.choice, delta)
        event = await stream.next()
    if isinstance(event, ModelCallError):
        yield server_sent_event({"error": openai_error_body(event)})
        return
    head["id"] = head["id"] or completion_id(event[0].call_id)
    for index, reply in enumerate(event):
        choice = _choice(call, index, reply, session)
        del choice["index"], choice["message"]
        opening = {} if index in begun else {"role": "assistant", "content": ""}
        yield chunk(index, opening, choice.pop("finish_reason"), **choice)
    if call.include_usage:
        yield server_sent_event({**head, "choices": [], "usage": usage(event)})
    yield b"data: [DONE]\n\n"


def call_piece(piece: CallPiece) -> dict[str, Any]:
    """Part of a tool call; the first one has its id and name."""
    if not piece.begins:
        more = {} if piece.failed is None else {"error": unreadable_call(piece.failed)}
        return {"index": piece.index, "function": {"arguments": piece.arguments}, **more}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def unreadable_call(why: str) -> dict[str, Any]:
    """What ends a call in a stream that turned out to be unreadable."""
    return {"type": "unreadable_tool_call", "message": f"{why}: the call can't be read, and its text follows"}
