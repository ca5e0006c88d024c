"""`POST /v1/completions`: prompts as text or token ids, without template or parsing, for agents that work with tokens.

A prompt that begins with a recorded call's tokens (its prompt and its reply) extends that call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import accumulate
from typing import Any

from ajet.gateway import protocol
from ajet.gateway.chat import EpisodeSession, ReplyDelta
from ajet.gateway.openai_chat import MAX_CHOICES, openai_error_body, read_sampling
from ajet.gateway.protocol import BadField, Caller, Event, ReplyStream, read_model, refuse_unsupported
from ajet.schema.chat import DEFAULT_TARGET, ChatReply, ChatRequest
from ajet.schema.errors import ModelCallError
from ajet.system.http_messages import Answer, event_stream, json_answer, server_sent_event

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
    if protocol.flag(body, "stream"):
        if len(requests) > 1:
            raise BadField("prompt", "only one prompt can be streamed")
        stream = ReplyStream(requests[0], caller.session)
        first = await stream.first()
        include_usage = protocol.flag(protocol.mapping(body, "stream_options"), "include_usage")
        write = partial(_choice, session=caller.session, logprobs=logprobs, token_ids=token_ids)
        return event_stream(_chunks(asked.name, include_usage, write, stream, first), stream.close)
    completed = (caller.session.complete(request) for request in requests)
    results = await asyncio.gather(*completed, return_exceptions=True)  # an error waits for the others
    replies: list[ChatReply] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        replies += result
    answer = {
        **_head(replies[0].call_id, asked.name),
        "choices": [
            _choice(index, reply, caller.session, logprobs, token_ids=token_ids) for index, reply in enumerate(replies)
        ],
        "usage": _usage(replies, choices),
    }
    return json_answer(answer)


async def _prompts(prompt: Any, session: EpisodeSession) -> list[list[int]]:
    if isinstance(prompt, str):
        return [await session.encode(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise BadField("prompt", "prompt must be a string, a list of token ids, or a list of those")
    if all(isinstance(token, int) for token in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise BadField("prompt", f"at most {MAX_PROMPTS} prompts")
    if all(isinstance(one, str) or (isinstance(one, list) and one) for one in prompt):
        return [await session.encode(one) if isinstance(one, str) else one for one in prompt]
    raise BadField("prompt", "prompt must be a string, a list of token ids, or a list of those")


def _head(call_id: str, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{call_id}", "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(
    index: int, reply: ChatReply, session: EpisodeSession, logprobs: int | None, *, token_ids: bool
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": reply.text,
        "logprobs": None if logprobs is None else _logprobs(reply, session),
        "finish_reason": reply.finish_reason,
        "call_id": reply.call_id,
    }
    if token_ids:
        choice |= {"token_ids": reply.completion.token_ids, "prompt_token_ids": reply.prompt_ids}
    return choice


def _logprobs(reply: ChatReply, session: EpisodeSession) -> dict[str, Any]:
    completion = reply.completion
    tokens = [session.decode_token(token) for token in completion.token_ids]
    top = completion.top_logprobs
    return {
        "tokens": tokens,
        "token_logprobs": completion.logprobs,
        "top_logprobs": [{session.decode_token(t): value for t, value in row} for row in top] if top else None,
        "text_offset": list(accumulate((len(token) for token in tokens[:-1]), initial=0)),
    }


def _usage(replies: list[ChatReply], choices: int) -> dict[str, int]:
    prompt = sum(len(reply.prompt_ids) for reply in replies[::choices])
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


async def _chunks(
    model: str,
    include_usage: bool,
    write: Callable[[int, ChatReply], dict[str, Any]],
    stream: ReplyStream,
    event: Event,
) -> AsyncIterator[bytes]:
    """Server-sent events, beginning with `event`. The last chunk of a choice, as `write` makes it, has its
    log-probabilities and ids."""
    head: dict[str, Any] = {}
    while isinstance(event, ReplyDelta):
        head = head or _head(event.call_id, model)
        choice = {"index": event.choice, "text": event.delta.content, "logprobs": None, "finish_reason": None}
        yield server_sent_event({**head, "choices": [choice]})
        event = await stream.next()
    if isinstance(event, ModelCallError):
        yield server_sent_event({"error": openai_error_body(event)})
        return
    head = head or _head(event[0].call_id, model)
    for index, reply in enumerate(event):
        yield server_sent_event({**head, "choices": [{**write(index, reply), "text": ""}]})
    if include_usage:
        yield server_sent_event({**head, "choices": [], "usage": _usage(event, len(event))})
    yield b"data: [DONE]\n\n"
