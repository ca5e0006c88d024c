"""`ReplyReader`: parses one reply while it is generated; `ResponseFormat`: whether it has the form asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from ajet.gateway.chat.reply_parser import Delta, ReplyParser
from ajet.schema.chat import ChatReply, ChatRequest, Completion, Message, TokenChunk, Tool
from ajet.schema.errors import InvalidRequestError
from ajet.system.json_schemas import SchemaRefused, breach, check_schema, on_loop

if TYPE_CHECKING:
    from ajet.context_tracker import PreparedCall, Renderer


NO_TOKENS = TokenChunk([], [])


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """A piece of one choice that later tokens can't change."""

    choice: int
    call_id: str
    delta: Delta
    tokens: TokenChunk = NO_TOKENS
    """The tokens sampled since the previous delta."""


OnDelta = Callable[[ReplyDelta], None]
"""Called on the service loop."""


class ReplyReader:
    """Turns the tokens of one call into deltas and the reply."""

    def __init__(
        self,
        renderer: Renderer,
        parser: ReplyParser,
        tools: list[Tool],
        prepared: PreparedCall,
        choice: int,
        on_delta: OnDelta | None,
    ) -> None:
        opened = parser.markup.think_open
        tail = renderer.decode(prepared.prompt_ids[-8:]) if opened else ""
        self.streams = on_delta is not None
        self._renderer = renderer
        self._prepared = prepared
        self._choice = choice
        self._on_delta = on_delta
        self._stream = parser.stream(
            tools,
            call_id=prepared.call_id,
            in_reasoning=bool(opened) and tail.rstrip().endswith(opened),
            pieces=self.streams,
        )
        self._text = IncrementalText(renderer, prepared.sampling.stop) if self.streams else None
        self._new = TokenChunk([], [])
        """Tokens that no delta has reported yet."""
        self._drawn = 0

    def on_tokens(self, chunk: TokenChunk) -> None:
        """Take the next tokens, and emit the text that is now final."""
        assert self._text is not None
        self._draw(chunk.token_ids, chunk.logprobs)
        self._give(self._stream.feed(self._text.feed(chunk.token_ids)))

    def finish(self, completion: Completion) -> ChatReply:
        """Emit the rest, and return the whole reply."""
        text = self._renderer.decode(completion.token_ids, stopped_by=completion.stopped_by)
        self._draw(completion.token_ids[self._drawn :], completion.logprobs[self._drawn :])
        self._give(self._stream.finish(self._text.finish(text) if self._text else text))
        parsed = self._stream.reply()
        calls = parsed.message.get("tool_calls")
        return ChatReply(
            call_id=self._prepared.call_id,
            message=parsed.message,
            finish_reason="tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason,
            text=text,
            prompt_ids=self._prepared.prompt_ids,
            completion=completion,
            malformed=parsed.malformed,
        )

    def _give(self, deltas: list[Delta]) -> None:
        if self._on_delta is not None:
            for delta in deltas:
                tokens, self._new = self._new, TokenChunk([], [])
                self._on_delta(ReplyDelta(self._choice, self._prepared.call_id, delta, tokens))

    def _draw(self, token_ids: list[int], logprobs: list[float]) -> None:
        self._drawn += len(token_ids)
        self._new.token_ids.extend(token_ids)
        self._new.logprobs.extend(logprobs)


class IncrementalText:
    """Decodes a growing reply. A character whose bytes are incomplete, and a possible stop string, are held back.

    Each piece is decoded together with the few tokens before it, so the cost per token doesn't grow with the reply, and
    leading spaces come out as they do in the whole text.
    """

    def __init__(self, renderer: Renderer, stop: tuple[str, ...]) -> None:
        self._renderer = renderer
        self._hold = max((len(text) for text in stop), default=1) - 1
        self._ids: list[int] = []
        self._from = 0
        self._until = 0
        self._text = ""
        self._given = 0

    def feed(self, token_ids: list[int]) -> str:
        """The text that is final with these tokens."""
        self._ids.extend(token_ids)
        before = self._renderer.decode(self._ids[self._from : self._until])
        after = self._renderer.decode(self._ids[self._from :])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self._text += after[len(before) :]
            self._from, self._until = self._until, len(self._ids)
        end = len(self._text) - self._hold
        if end <= self._given:
            return ""
        piece, self._given = self._text[self._given : end], end
        return piece

    def finish(self, text: str) -> str:
        """The part of the reply's text that hasn't been emitted yet."""
        rest = text[self._given :]
        self._given = len(text)
        return rest


class ResponseFormat:
    """A checked `response_format`."""

    def __init__(self, given: dict[str, Any]) -> None:
        """Raises InvalidRequestError. The schema itself is validated later, by `check`."""
        self.kind = given.get("type")
        self._schema: dict[str, Any] | None = None
        if self.kind not in ("text", "json_object", "json_schema"):
            raise InvalidRequestError("response_format.type must be text, json_object or json_schema")
        if self.kind == "json_schema":
            named = given.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequestError("response_format.json_schema needs a schema (object)")
            self._schema = schema

    def instruct(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with the format requested at the end of the system message."""
        if self.kind == "text":
            return list(messages)
        first, *rest = messages
        if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
            return [{**first, "content": f"{first['content']}\n\n{self._wanted}"}, *rest]
        return [{"role": "system", "content": self._wanted}, *messages]

    @cached_property
    def _wanted(self) -> str:
        if self._schema is None:
            return "Answer with JSON only."
        schema = json.dumps(self._schema, ensure_ascii=False)
        return f"Answer with JSON only, valid under this JSON schema:\n{schema}"

    async def check(self) -> None:
        """Raises InvalidRequestError if the schema isn't one."""
        if self._schema is None:
            return
        try:
            await on_loop(self._check)
        except SchemaRefused as error:
            raise InvalidRequestError(
                f"response_format.json_schema.schema is not a JSON schema: {error!s:.200}"
            ) from None

    def _check(self) -> None:
        """Validate the schema, on the thread for slow work."""
        check_schema(self._schema or {})
        _ = self._wanted

    async def violation(self, message: Message) -> str:
        """How a reply violates the format, or an empty string. Tool calls are exempt."""
        if self.kind == "text" or message.get("tool_calls"):
            return ""
        try:
            value = msgspec.json.decode(message.get("content") or "")
        except (msgspec.DecodeError, RecursionError) as error:
            return f"response_format: not JSON: {error}"
        if self._schema is None:
            return "" if isinstance(value, dict) else "response_format: not a JSON object"
        try:
            found = await on_loop(breach, self._schema, value)
        except SchemaRefused as problem:
            return f"response_format: the schema can't be applied: {problem!s:.200}"
        return f"response_format: {found.path}: {found.message[:200]}" if found is not None else ""


def unmet(request: ChatRequest, tools: list[Tool], message: Message) -> tuple[str, ...]:
    """What the request demanded and the reply lacks. Enforcing it would change the policy's distribution."""
    lacks = []
    calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
    called = set(calls)
    if isinstance(request.tool_choice, dict):
        name = request.tool_choice["function"]["name"]
        if name not in called:
            lacks.append(f"tool_choice: {name} was not called")
    elif request.tool_choice == "required" and tools and not called:
        lacks.append("tool_choice: no tool was called")
    if request.allowed_tools is not None and (others := sorted(called - set(request.allowed_tools))):
        lacks.append(f"tool_choice: {', '.join(others)} is not among the allowed tools")
    if not request.parallel_tool_calls and len(calls) > 1:
        lacks.append(f"parallel_tool_calls: {len(calls)} tools were called at once")
    return tuple(lacks)
