"""`POST /v1/responses`: OpenAI's Responses protocol, complete or streamed. As in a chat stream, the log-probabilities
come at the end, with the whole response."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

from ajet.gateway.chat import CallPiece, EpisodeSession, ReplyDelta
from ajet.gateway.openai_completions import logprobs_of
from ajet.gateway.protocol import Caller, Event, ReplyStream, unreadable_call
from ajet.gateway.responses_items import (
    Item,
    ResponseCall,
    ResponsesTools,
    call_item,
    read_response_call,
    reasoning_item,
    reply_items,
    text_item,
    text_part,
)
from ajet.schema.chat import ChatReply
from ajet.schema.errors import ModelCallError
from ajet.system.http_messages import Answer, event_stream, json_answer, server_sent_event


def add_logprobs(reply: ChatReply, output: list[Item], session: EpisodeSession) -> None:
    """Add the log-probabilities to the text of a reply's items."""
    entries, places = logprobs_of(reply.completion, session)["content"], _TokenPlaces(reply, session)
    for item in output:
        for part in item.get("content", []):
            if part["type"] == "output_text":
                part["logprobs"] = [entries[index] for index in places.under(part["text"])]


class _TokenPlaces:
    """Where in a reply's text each of its tokens ends."""

    def __init__(self, reply: ChatReply, session: EpisodeSession) -> None:
        self._text = ""
        self._ends: list[int] = []
        pieces = session.incremental_text()
        for token_id in reply.completion.token_ids:
            self._text += pieces.feed([token_id])
            self._ends.append(len(self._text))

    def under(self, text: str) -> list[int]:
        """The tokens that overlap with this text, by their indices."""
        start = self._text.find(text) if text else -1
        if start < 0:
            return []
        return [
            index
            for index, (first, after) in enumerate(zip([0, *self._ends], self._ends, strict=False))
            if start <= max(first, after - 1) and first < start + len(text)
        ]


async def responses(body: dict[str, Any], caller: Caller) -> Answer:
    """Answer one request. Raises `ModelCallError` until something has been sent."""
    call = read_response_call(body, caller)
    if call.stream:
        stream = ReplyStream(call.request, caller.session)
        first = await stream.first()
        return event_stream(response_events(call, caller.session, stream, first), stream.close)
    (reply,) = await caller.session.complete(call.request)
    items = reply_items(reply, call.tools)
    if call.logprobs:
        add_logprobs(reply, items, caller.session)
    _store(call, reply, items, caller.session)
    return json_answer(_finished(call, reply, items, int(time.time()), caller.session))


def response_id(call_id: str) -> str:
    return f"resp_{call_id}"


def _store(call: ResponseCall, reply: ChatReply, items: list[Item], session: EpisodeSession) -> None:
    if call.store:
        new = [*call.new, reply.message]
        session.responses.put(response_id(reply.call_id), call.request.agent, call.before, new, items)


# ---------------------------------------------------------------- the response object


def _response(call: ResponseCall, call_id: str, created: int, status: str, output: list[Item]) -> dict[str, Any]:
    """A response object in any state. It echoes the request's settings."""
    body, sampling = call.body, call.request.sampling
    return {
        "id": response_id(call_id),
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": sampling.max_tokens,
        "metadata": body.get("metadata") or {},
        "model": call.model,
        "output": output,
        "parallel_tool_calls": call.request.parallel_tool_calls,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "store": call.store,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _finished(
    call: ResponseCall, reply: ChatReply, output: list[Item], created: int, session: EpisodeSession
) -> dict[str, Any]:
    cut = reply.finish_reason == "length"
    response = _response(call, reply.call_id, created, "incomplete" if cut else "completed", output)
    response["usage"] = _usage(reply, session)
    if cut:
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    if call.token_ids:
        response |= {"prompt_token_ids": reply.prompt_ids, "token_ids": reply.completion.token_ids}
    if reply.malformed:
        response["malformed"] = reply.malformed
    return response


def _usage(reply: ChatReply, session: EpisodeSession) -> dict[str, Any]:
    prompt, sampled = reply.spent
    reasoning = reply.message.get("reasoning_content")
    thought = _TokenPlaces(reply, session).under(reasoning) if reasoning else []
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": reply.completion.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": len(thought)},
        "total_tokens": prompt + sampled,
    }


# ---------------------------------------------------------------- streaming


async def response_events(
    call: ResponseCall, session: EpisodeSession, stream: ReplyStream, event: Event
) -> AsyncIterator[bytes]:
    """Server-sent events, beginning with `event`: items are opened, filled and closed one after another."""
    created = int(time.time())
    numbers = count()

    def write(type: str, **fields: Any) -> bytes:
        return server_sent_event({"type": type, "sequence_number": next(numbers), **fields}, type)

    assert not isinstance(event, ModelCallError)
    call_id = event.call_id if isinstance(event, ReplyDelta) else event[0].call_id
    items = _OpenItems(call_id, call.tools)
    for kind in ("response.created", "response.in_progress"):
        yield write(kind, response=_response(call, call_id, created, "in_progress", []))
    while isinstance(event, ReplyDelta):
        for change in items.take(event):
            yield write(**change)
        event = await stream.next()
    if isinstance(event, ModelCallError):
        failed = _response(call, call_id, created, "failed", items.done)
        failed["error"] = {"code": "server_error", "message": str(event)}
        yield write("response.failed", response=failed)
        return
    (reply,) = event
    for change in items.finish("incomplete" if reply.finish_reason == "length" else "completed"):
        yield write(**change)
    output = items.done if not items.broken else reply_items(reply, call.tools)
    if call.logprobs:
        add_logprobs(reply, output, session)
    _store(call, reply, output, session)
    finished = _finished(call, reply, output, created, session)
    yield write(f"response.{finished['status']}", response=finished)


Change = dict[str, Any]
"""One event: its type and its fields."""


class _OpenItems:
    """The output items of a reply that is being written."""

    def __init__(self, call_id: str, tools: ResponsesTools) -> None:
        self.broken = False
        """An item was begun as a call that turned out not to be one, so the final message differs from these items."""
        self._call_id = call_id
        self._tools = tools
        self._open_call: dict[str, Any] = {}
        self._text: list[str] = []
        """The text of the open item so far."""
        self._id = ""
        """The id of the open item."""
        self._kind = ""
        """`message`, `reasoning` or `call`, while such an item is open."""
        self.done: list[Item] = []

    def take(self, event: ReplyDelta) -> Iterator[Change]:
        delta = event.delta
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add("message", delta.content)
        if delta.call is not None:
            yield from self._call(delta.call)

    def finish(self, status: str) -> Iterator[Change]:
        """Close what is open. A reply without text or calls ends with an empty text."""
        if not self._kind and (not self.done or self.done[-1]["type"] == "reasoning"):
            yield from self._open("message")
        elif self._kind == "reasoning":
            yield from self._close()
            yield from self._open("message")
        yield from self._close(status)

    def _add(self, kind: str, text: str) -> Iterator[Change]:
        if kind != self._kind:
            yield from self._close()
            yield from self._open(kind)
        self._text.append(text)
        if kind == "reasoning":
            yield {"type": "response.reasoning_text.delta", **self._place(), "delta": text}
            return
        yield {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": []}

    def _item(self, status: str = "completed") -> Item:
        text = "".join(self._text)
        if self._kind == "message":
            return text_item(self._call_id, len(self.done), text, status)
        return reasoning_item(self._call_id, len(self.done), text)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.done), "content_index": 0}

    def _open(self, kind: str) -> Iterator[Change]:
        self._kind, self._text = kind, []
        item = {**self._item("in_progress"), "content": [], "status": "in_progress"}
        self._id = item["id"]
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": item}
        part = text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        yield {"type": "response.content_part.added", **self._place(), "part": part}

    def _close(self, status: str = "completed") -> Iterator[Change]:
        if not self._kind:
            return
        assert self._kind != "call", "a call's last piece closes it"
        item, text = self._item(status), "".join(self._text)
        if self._kind == "message":
            yield {"type": "response.output_text.done", **self._place(), "text": text, "logprobs": []}
        else:
            yield {"type": "response.reasoning_text.done", **self._place(), "text": text}
        yield {"type": "response.content_part.done", **self._place(), "part": item["content"][0]}
        yield from self._done(item)
        self._kind = ""

    def _call(self, piece: CallPiece) -> Iterator[Change]:
        """A custom tool's input is inside its arguments, so it comes whole."""
        if piece.begins:
            yield from self._close()
            function = {"name": piece.name, "arguments": ""}
            self._kind, self._text = "call", []
            self._open_call = {"id": piece.id, "type": "function", "function": function}
            item = self._call_item("in_progress")
            self._id = item["id"]
            yield {"type": "response.output_item.added", "output_index": len(self.done), "item": item}
        self._text.append(piece.arguments)
        if piece.arguments and self._call_item("")["type"] == "function_call":
            event = "response.function_call_arguments.delta"
            yield {"type": event, **self._call_place(), "delta": piece.arguments}
        if piece.failed is not None:
            self.broken = True
            yield from self._close_call("incomplete", error=unreadable_call(piece.failed))
        elif piece.ends:
            yield from self._close_call("completed")

    def _call_item(self, status: str) -> Item:
        return call_item(self._call_id, len(self.done), self._open_call, self._tools, status)

    def _call_place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.done)}

    def _close_call(self, status: str, **more: Any) -> Iterator[Change]:
        self._open_call["function"]["arguments"] = "".join(self._text)
        item = self._call_item(status)
        if item["type"] == "custom_tool_call":
            event = "response.custom_tool_call_input"
            yield {"type": f"{event}.delta", **self._call_place(), "delta": item["input"]}
            yield {"type": f"{event}.done", **self._call_place(), "input": item["input"]}
        else:
            whole = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **self._call_place(), **whole}
        yield from self._done({**item, **more})
        self._kind = ""

    def _done(self, item: Item) -> Iterator[Change]:
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)
