"""The bytes that each token id stands for, so that a reader of episodes needs no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

TokenBytes = Callable[[Iterable[int]], dict[int, bytes]]


def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """A function from ids to the bytes of each, for a Hugging Face tokenizer of any kind.

    Byte-level vocabularies give exact bytes (a token may be part of a character); SentencePiece ones their pieces.
    """
    byte_level = "Ġ" in tokenizer.get_vocab() or "Ċ" in tokenizer.get_vocab()
    alphabet = {character: byte for byte, character in _byte_alphabet().items()}
    added = {int(index): str(token) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}

    def piece(index: int) -> bytes:
        if index in added:
            return added[index].encode()
        token = tokenizer.convert_ids_to_tokens(index)
        if token is None:
            return f"<{index}>".encode()
        if byte_level and all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("▁", " ").encode()

    def pieces(ids: Iterable[int]) -> dict[int, bytes]:
        return {index: piece(index) for index in ids}

    return pieces


def _byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level vocabularies write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
