"""Log-probabilities in `/v1/responses`: each part of text has the tokens that it is made of, whole and streamed.

While a reply is streamed, a token's likeliest alternatives aren't known yet: `top_logprobs` is empty in deltas, and
complete in the final response.
"""

from __future__ import annotations

from typing import Any

from ajet.gateway.chat import EpisodeSession
from ajet.gateway.openai_chat import logprobs_of, token_entry
from ajet.gateway.responses_items import Item
from ajet.schema.chat import ChatReply
from ajet.schema.generation import TokenChunk

Entry = dict[str, Any]


def add_logprobs(reply: ChatReply, output: list[Item], session: EpisodeSession) -> None:
    """Put them into the text of a reply's items."""
    tokens = logprobs_of(reply.completion, session)["content"]
    spans = _Spans()
    for token, piece in zip(tokens, session.token_texts(reply.completion.token_ids), strict=True):
        spans.add(token, piece)
    for item in output:
        for part in item.get("content", []):
            if part["type"] == "output_text":
                part["logprobs"] = spans.under(part["text"])


class StreamedLogprobs:
    """Which tokens each delta of a stream is made of."""

    def __init__(self, session: EpisodeSession) -> None:
        self.said: list[Entry] = []
        """Those of the open text so far."""
        self._session = session
        self._text = session.incremental_text()
        self._spans = _Spans()
        self._at: int | None = None
        """Where the open text goes on in the reply; None before its first delta."""
        self._next = 0
        """The first token that has not been given out."""

    def feed(self, chunk: TokenChunk) -> None:
        """Take the tokens that have come."""
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            entry = {**token_entry(token_id, logprob, self._session), "top_logprobs": []}
            self._spans.add(entry, self._text.feed([token_id]))

    def opened(self) -> None:
        """A text begins: marks that aren't part of any text may stand before it."""
        self._at, self.said = None, []

    def of(self, delta: str) -> list[Entry]:
        """The tokens that end in the next delta."""
        spans = self._spans
        # the first time: what is held back after the delta is short, what stands before it may be long
        start = spans.text.rfind(delta) if self._at is None else spans.text.find(delta, self._at)
        if start < 0:
            return []
        if start != self._at:
            while self._next < len(spans.ends) and spans.ends[self._next] <= start:
                self._next += 1
        self._at = start + len(delta)
        first = self._next
        while self._next < len(spans.ends) and spans.ends[self._next] <= self._at:
            self._next += 1
        found = spans.entries[first : self._next]
        self.said += found
        return found


class _Spans:
    """The tokens of a reply, and where the text of each ends."""

    def __init__(self) -> None:
        self.text = ""
        self.entries: list[Entry] = []
        self.ends: list[int] = []

    def add(self, entry: Entry, piece: str) -> None:
        self.text += piece
        self.entries.append(entry)
        self.ends.append(len(self.text))

    def under(self, text: str) -> list[Entry]:
        """The tokens that overlap with this text."""
        start = self.text.find(text) if text else -1
        if start < 0:
            return []
        starts = [0, *self.ends]
        return [
            entry
            for entry, first, after in zip(self.entries, starts, self.ends, strict=False)
            if start <= max(first, after - 1) and first < start + len(text)
        ]
