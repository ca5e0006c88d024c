"""`TextEncoder`: encodes rendered text to token ids, so that only the template's own control tokens become control
tokens.

Text is cut before each control token, and the pieces are encoded one by one and cached: rendering a history again costs
one look-up per piece. For each tokenizer, a check verifies that this gives the same ids as encoding the whole text;
tokenizers that fail it (those with context-sensitive normalisers) encode whole texts.

A control token inside a user's string is broken by a marker (`mark`) before rendering; the text is cut there, so that
it can't be read as the token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ajet.schema.errors import InvalidRequestError

MARK = "\ufdd0"
"""A noncharacter, which Unicode reserves for use inside a program. In a user's text it becomes U+FFFD."""
ESCAPED_MARK = "\\ufdd0"
"""The marker as written by a template that escapes JSON to ASCII."""
CACHE_CHARACTERS = 64_000_000
"""Characters of cached pieces, a few hundred MB at most; beyond that the cache is cleared."""
BEGINNING = 4
"""Characters per allowed id that are encoded first: in most texts that are far too long, they have too many ids."""
XML_TAG = re.compile(r"</?[A-Za-z][\w\-]*/?>")
BRACKETED = re.compile(r"<\S+>|\[\S+\]")
"""The form of control tokens that their tokenizer doesn't mark as special: `<｜User｜>`, `[INST]`."""


def control_tokens(tokenizer: Any, template: str) -> tuple[str, ...]:
    """The tokens that no user's text may produce.

    Special ones, and bracketed added ones that the template writes. But not those that look like XML tags (`<think>`
    or `<tool_call>`) and aren't special: people put them in prompts on purpose, and models learned to read them.
    """
    chosen = []
    for token in tokenizer.added_tokens_decoder.values():
        text = token.content
        if not text.strip():
            continue
        tag = BRACKETED.fullmatch(text) and not XML_TAG.fullmatch(text)
        if token.special or (tag and text in template):
            chosen.append(text)
    return tuple(sorted(chosen, key=lambda text: (-len(text), text)))


class TextEncoder:
    """Encodes rendered texts. One per tokenizer."""

    def __init__(self, tokenizer: Any, controls: tuple[str, ...], samples: Iterable[str]) -> None:
        self.controls = controls
        self._control = re.compile("|".join(map(re.escape, controls)) or "(?!)")
        self._plain = _plain_encoder(tokenizer)
        self.decode = _plain_decoder(tokenizer)
        """The text of ids, control tokens included."""
        self._guard, self._guard_ids = self._find_guard(tokenizer)
        self._cache: dict[str, list[int]] = {}
        self._numbers: dict[int, int] = {}
        self._cached_characters = 0
        self._in_pieces = all(self._encode_pieces(text) == self._plain(text) for text in samples)

    def shared(self, ids: Sequence[int]) -> list[int]:
        """The same ids, with each number held once in memory.

        Prompts are copied at every call, which touches every number's reference count: with numbers scattered over the
        memory that is several times slower, and each takes 28 bytes.
        """
        return list(map(self._numbers.setdefault, ids, ids))

    def mark(self, value: Any) -> Any:
        """The same data with every control token in its strings broken by a marker."""
        if isinstance(value, str):
            if MARK in value:
                value = value.replace(MARK, "\ufffd")
            return self._break(value) if self._control.search(value) else value
        if isinstance(value, dict):
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        return value

    def _break(self, text: str) -> str:
        pieces, start = [], 0
        while found := self._control.search(text, start):
            cut = found.start() + 1
            pieces.append(text[start:cut])
            start = cut
        pieces.append(text[start:])
        return MARK.join(pieces)

    def whole(self, text: str) -> list[int]:
        """The ids of a whole rendered text."""
        text = text.replace(ESCAPED_MARK, MARK) if ESCAPED_MARK in text else text
        return self._encode_pieces(text) if self._in_pieces else self._encode_piece(text)

    def beyond(self, text: str, most: int) -> int:
        """How many ids the beginning of a long text has, if that is more than `most` already; else 0."""
        beginning = text[: BEGINNING * most]
        if len(text) <= 2 * len(beginning):
            return 0  # all of it would not take much longer
        count = len(self.whole(beginning))
        return count if count > most else 0

    def continuation(self, text: str) -> list[int]:
        """The ids of a text that follows others."""
        text = text.replace(ESCAPED_MARK, MARK) if ESCAPED_MARK in text else text
        if self._in_pieces and self._control.match(text):
            return self._encode_pieces(text)
        ids: list[int] = []
        for piece in text.split(MARK):
            ids += self._continue(piece)
        return ids

    def first_control(self, text: str) -> str:
        """The first control token in a text, or an empty string."""
        found = self._control.search(text)
        return found[0] if found else ""

    def control_at_end(self, text: str) -> str:
        """The control token that a text ends with, or an empty string."""
        return next((token for token in self.controls if text.endswith(token)), "")

    def _encode_pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        cache = self._cache
        cuts = [found.start() for found in self._control.finditer(text)]
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if start == end:
                continue
            piece = text[start:end]
            known = cache.get(piece)
            if known is None:
                known = self.shared(self._encode_piece(piece))
                self._cached_characters += len(piece) + 64
                if self._cached_characters > CACHE_CHARACTERS:
                    cache.clear()
                    self._cached_characters = len(piece)
                cache[piece] = known
            ids += known
        return ids

    def _encode_piece(self, piece: str) -> list[int]:
        first, *rest = piece.split(MARK)
        ids = list(self._plain(first))
        for part in rest:
            ids += self._continue(part)
        return ids

    def _continue(self, text: str) -> list[int]:
        """Encode a text without the prefix that some tokenizers add at the start."""
        if not text:
            return []
        if not self._guard:
            return list(self._plain(text))
        ids = self._plain(self._guard + text)
        count = len(self._guard_ids)
        return list(ids[count:]) if list(ids[:count]) == self._guard_ids else list(self._plain(text))

    def _find_guard(self, tokenizer: Any) -> tuple[str, list[int]]:
        """SentencePiece tokenizers add a space before a text, but not after a newline."""
        word = list(self._plain("word"))
        if tokenizer.decode(word + word) == "wordword":
            return "", []
        return "\n", list(self._plain("\n"))


def _plain_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """A function that encodes without special tokens, avoiding the overhead of `tokenizer(text)`."""

    backend = getattr(tokenizer, "backend_tokenizer", None)  # None: a tokenizer written in Python
    # Texts come one at a time, so threads would only hinder forking.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def encode(text: str) -> list[int]:
        try:
            # Another user of the tokenizer may have left padding or truncation on; its own `encode` resets them.
            if backend is None or backend.padding or backend.truncation or backend.encode_special_tokens:
                return list(tokenizer.encode(text, add_special_tokens=False))
            # Without offsets it takes half the time.
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):  # which of them depends on the tokenizer's version
            refuse_half_pairs(text)
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # from the tokenizer's Rust code: not even an Exception
                raise
            raise InvalidRequestError("the tokenizer can't encode this text") from error
        return ids

    return encode


def _plain_decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """A function that decodes everything, avoiding what `tokenizer.decode` does for other kinds of input."""
    from transformers import PreTrainedTokenizerFast

    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def refuse_half_pairs(text: str) -> None:
    """Raises InvalidRequestError if the text isn't Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 20) : error.start].encode("utf-8", "backslashreplace").decode()
        raise InvalidRequestError(
            f"the text has half of a surrogate pair (\\u{ord(text[error.start]):04x}, after {before!r}), which is no "
            "character: send whole ones, or text.encode('utf-8', 'replace').decode()"
        ) from None
