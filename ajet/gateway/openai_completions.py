"""OpenAI's completions, complete or streamed: `POST /v1/chat/completions`, and `POST /v1/completions` with prompts as
text or token ids, without template or parsing, for agents that work with tokens.

A prompt that begins with a recorded call's tokens (its prompt and its reply) extends that call.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

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
    read_sampling,
    read_tool_choice,
    refuse_unsupported,
    unreadable_call,
)
from ajet.schema.chat import (
    DEFAULT_TARGET,
    ChatReply,
    ChatRequest,
    Completion,
    FixedTools,
    JsonMessages,
    Message,
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
    server_sent_event,
)

MAX_CHOICES = 64


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


def _head(prefix: str, kind: str, model: str, call_id: str) -> dict[str, Any]:
    """Its `id` is the first choice's call; each choice has its own `call_id`."""
    return {"id": f"{prefix}-{call_id}", "object": kind, "created": int(time.time()), "model": model}


def chat_completion(call: ChatCall, replies: list[ChatReply], session: EpisodeSession) -> dict[str, Any]:
    """The complete answer."""
    answer: dict[str, Any] = {
        **_head("chatcmpl", "chat.completion", call.model, replies[0].call_id),
        "choices": [_choice(call, index, reply, session) for index, reply in enumerate(replies)],
        "usage": usage(replies, len(replies)),
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


def usage(replies: list[ChatReply], choices: int) -> dict[str, Any]:
    """`choices`: how many of the replies share a prompt."""
    prompts = [replies[at : at + choices] for at in range(0, len(replies), choices)]
    prompt = sum(same[0].spent[0] for same in prompts)
    sampled = sum(reply.spent[1] for reply in replies)
    cached = sum(max(reply.completion.cached_prompt_tokens for reply in same) for same in prompts)
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


def chat_chunks(call: ChatCall, session: EpisodeSession, stream: ReplyStream, event: Event) -> AsyncIterator[bytes]:
    """Server-sent events, beginning with `event`. The last chunk of a choice carries its log-probabilities and ids."""
    begun: set[int] = set()
    """The choices that have begun."""

    def opening(index: int) -> dict[str, Any]:
        if index in begun:
            return {}
        begun.add(index)
        return {"role": "assistant", "content": ""}

    def piece(event: ReplyDelta) -> dict[str, Any]:
        delta = opening(event.choice)
        if event.delta.content:
            delta["content"] = event.delta.content
        if event.delta.reasoning:
            delta["reasoning_content"] = event.delta.reasoning
        if event.delta.call is not None:
            delta["tool_calls"] = [call_piece(event.delta.call)]
        return {"index": event.choice, "delta": delta, "finish_reason": None}

    def last(index: int, reply: ChatReply) -> dict[str, Any]:
        choice = _choice(call, index, reply, session)
        del choice["message"]
        return {**choice, "delta": opening(index)}

    head = partial(_head, "chatcmpl", "chat.completion.chunk", call.model)
    return _chunks(head, piece, last, stream, event, include_usage=call.include_usage)


async def _chunks(
    head_of: Callable[[str], dict[str, Any]],
    piece: Callable[[ReplyDelta], dict[str, Any]],
    last: Callable[[int, ChatReply], dict[str, Any]],
    stream: ReplyStream,
    event: Event,
    *,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """The chunks of a stream, beginning with `event`: a choice with each delta, and at the end the rest of each."""
    head: dict[str, Any] = {}
    while isinstance(event, ReplyDelta):
        head = head or head_of(event.call_id)
        yield server_sent_event({**head, "choices": [piece(event)]})
        event = await stream.next()
    if isinstance(event, ModelCallError):
        yield server_sent_event({"error": openai_error_body(event)})
        return
    head = head or head_of(event[0].call_id)
    for index, reply in enumerate(event):
        yield server_sent_event({**head, "choices": [last(index, reply)]})
    if include_usage:
        yield server_sent_event({**head, "choices": [], "usage": usage(event, len(event))})
    yield b"data: [DONE]\n\n"


def call_piece(piece: CallPiece) -> dict[str, Any]:
    """Part of a tool call; the first one has its id and name."""
    if not piece.begins:
        more = {} if piece.failed is None else {"error": unreadable_call(piece.failed)}
        return {"index": piece.index, "function": {"arguments": piece.arguments}, **more}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


# ---------------------------------------------------------------- prompts without messages

MAX_PROMPTS = 64
MAX_TOKENS = 2**18
"""Tokens of all prompts of a request, each counted as often as it is completed."""


async def completions(body: dict[str, Any], caller: Caller) -> Answer:
    """Answer one request. Raises `ModelCallError` until something has been sent."""
    choices = protocol.integer(body, "n", 1, MAX_CHOICES) or 1
    refuse_unsupported(body, choices)
    asked = read_model(body, caller)
    logprobs = protocol.integer(body, "logprobs", 0, 20)
    sampling = read_sampling(body, caller.session.settings.default_sampling)
    prompts = await _prompts(body.get("prompt"), caller.session)
    if len(prompts) > 1 and (tokens := choices * sum(map(len, prompts))) > MAX_TOKENS:
        raise BadField(
            "prompt", f"prompts of {tokens} tokens, each counted n times: send at most {MAX_TOKENS} at a time"
        )
    requests = [
        ChatRequest(
            messages=[],
            prompt_ids=ids,
            sampling=sampling,
            agent=asked.agent,
            target=caller.target or DEFAULT_TARGET,
            trainable=asked.trainable,
            n=choices,
            top_logprobs=logprobs or 0,
        )
        for ids in prompts
    ]
    token_ids = protocol.flag(body, "return_token_ids")
    write = partial(_text_choice, session=caller.session, logprobs=logprobs, token_ids=token_ids)
    head = partial(_head, "cmpl", "text_completion", asked.name)
    if protocol.flag(body, "stream"):
        if len(requests) > 1:
            raise BadField("prompt", "only one prompt can be streamed")
        usage_too = protocol.flag(protocol.mapping(body, "stream_options"), "include_usage")
        stream = ReplyStream(requests[0], caller.session)
        first = await stream.first()

        def last(index: int, reply: ChatReply) -> dict[str, Any]:
            return {**write(index, reply), "text": ""}

        return event_stream(_chunks(head, _text_piece, last, stream, first, include_usage=usage_too), stream.close)
    completed = (caller.session.complete(request) for request in requests)
    results = await asyncio.gather(*completed, return_exceptions=True)  # an error waits for the others
    replies: list[ChatReply] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        replies += result
    answer = {
        **head(replies[0].call_id),
        "choices": [write(index, reply) for index, reply in enumerate(replies)],
        "usage": usage(replies, choices),
    }
    return json_answer(answer)


async def _prompts(prompt: Any, session: EpisodeSession) -> list[list[int]]:
    if isinstance(prompt, str):
        return [await session.encode(prompt)]
    given = prompt if isinstance(prompt, list) else []
    if given and all(isinstance(token, int) for token in given):
        return [given]
    if not given or not all(isinstance(one, str) or (isinstance(one, list) and one) for one in given):
        raise BadField("prompt", "prompt must be a string, a list of token ids, or a list of those")
    if len(given) > MAX_PROMPTS:
        raise BadField("prompt", f"at most {MAX_PROMPTS} prompts")
    return [await session.encode(one) if isinstance(one, str) else one for one in given]


def _text_choice(
    index: int, reply: ChatReply, session: EpisodeSession, logprobs: int | None, *, token_ids: bool
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": reply.text,
        "logprobs": None if logprobs is None else _text_logprobs(reply, session),
        "finish_reason": reply.finish_reason,
        "call_id": reply.call_id,
    }
    if token_ids:
        choice |= {"token_ids": reply.completion.token_ids, "prompt_token_ids": reply.prompt_ids}
    return choice


def _text_logprobs(reply: ChatReply, session: EpisodeSession) -> dict[str, Any]:
    completion = reply.completion
    tokens = [session.decode_token(token) for token in completion.token_ids]
    top = completion.top_logprobs
    return {
        "tokens": tokens,
        "token_logprobs": completion.logprobs,
        "top_logprobs": [{session.decode_token(t): value for t, value in row} for row in top] if top else None,
        "text_offset": list(accumulate((len(token) for token in tokens[:-1]), initial=0)),
    }


def _text_piece(event: ReplyDelta) -> dict[str, Any]:
    return {"index": event.choice, "text": event.delta.content, "logprobs": None, "finish_reason": None}
