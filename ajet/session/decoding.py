"""Token ids to text while they appear: only text that later tokens can't change is given out."""

from __future__ import annotations

from typing import Protocol


class Decoder(Protocol):
    """What the tracker's `Renderer` offers for replies."""

    def decode(self, token_ids: list[int], *, stopped_by: str | int | None = None) -> str: ...


class IncrementalText:
    """Decodes a growing reply. A character whose bytes are not complete yet, and a possible stop string, are held back.

    Decodes from a few tokens back each time, so the cost per token doesn't grow with the reply, and leading spaces come
    out as they do in the whole text.
    """

    def __init__(self, decoder: Decoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._hold = max((len(text) for text in stop), default=1) - 1
        self._ids: list[int] = []
        self._from = 0
        self._until = 0
        self._text = ""
        self._given = 0

    def feed(self, token_ids: list[int]) -> str:
        """The text that became certain with these tokens."""
        self._ids.extend(token_ids)
        before = self._decoder.decode(self._ids[self._from : self._until])
        after = self._decoder.decode(self._ids[self._from :])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self._text += after[len(before) :]
            self._from, self._until = self._until, len(self._ids)
        return self._give(len(self._text) - self._hold)

    def finish(self, text: str) -> str:
        """The rest, given the whole reply's text."""
        rest = text[self._given :]
        self._given = len(text)
        return rest

    def _give(self, end: int) -> str:
        if end <= self._given:
            return ""
        piece, self._given = self._text[self._given : end], end
        return piece
