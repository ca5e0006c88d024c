"""`ReplyReader`: reads one reply while it is generated. Token ids become text, text becomes deltas, and at the end the
whole reply. Only what later tokens can't change is given out early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet.gateway.chat.reply_parser import Delta, ReplyParser
from ajet.schema.chat import ChatReply, Tool
from ajet.schema.generation import Completion, TokenChunk

if TYPE_CHECKING:
    from ajet.context_tracker import PreparedCall, Renderer


NO_TOKENS = TokenChunk([], [])


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """What became certain of one choice while it is generated."""

    choice: int
    call_id: str
    delta: Delta
    tokens: TokenChunk = NO_TOKENS
    """What was drawn since the delta before."""


OnDelta = Callable[[ReplyDelta], None]
"""Called on the service loop."""


class ReplyReader:
    """Turns what the engine generates for one call into deltas and the reply."""

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
        """Tokens that no delta has reported."""
        self._drawn = 0

    def on_tokens(self, chunk: TokenChunk) -> None:
        """Take the next tokens and give out what became certain."""
        assert self._text is not None
        self._draw(chunk.token_ids, chunk.logprobs)
        self._give(self._stream.feed(self._text.feed(chunk.token_ids)))

    def finish(self, completion: Completion) -> ChatReply:
        """Give out the rest, and return the whole reply."""
        text = self._renderer.decode(completion.token_ids, stopped_by=completion.stopped_by)
        self._draw(completion.token_ids[self._drawn :], completion.logprobs[self._drawn :])
        deltas = self._stream.feed(self._text.finish(text) if self._text else text)
        deltas += self._stream.finish()
        self._give(deltas)
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
        """The text that became certain with these tokens."""
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
        """What is left to give out of the whole reply's text."""
        rest = text[self._given :]
        self._given = len(text)
        return rest
