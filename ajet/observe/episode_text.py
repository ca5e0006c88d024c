"""An episode as text: its conversations, what the text filter searches, one line for lists, the bytes of its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ajet.schema.call_tree import ROOT, CallTree
from ajet.schema.episode import Episode
from ajet.schema.printable import encodable

_SEARCHED_CHARACTERS = 200_000
"""The text filter searches an episode up to here."""
_PREVIEW_CHARACTERS = 160

TokenBytes = Callable[[Iterable[int]], dict[int, bytes]]


def conversation(tree: CallTree, call: int) -> list[dict[str, Any]]:
    """The messages of a call's prompt, then its reply."""
    chain: list[int] = []
    index = call
    while index != ROOT:
        chain.append(index)
        index = tree.calls[index].extends
    messages: list[dict[str, Any]] = []
    for index in reversed(chain):
        messages.extend(tree.calls[index].new_messages)
        if tree.calls[index].reply:
            messages.append(tree.calls[index].reply)
    return messages


def last_calls(tree: CallTree) -> list[int]:
    """The calls that no other call extends: one per conversation."""
    extended = {call.extends for call in tree.calls}
    return [index for index in range(len(tree.calls)) if index not in extended]


def message_text(message: dict[str, Any]) -> str:
    """The text of a message: content, reasoning and tool calls."""
    return "\n".join(_parts(message))


def _parts(message: dict[str, Any]) -> Iterator[str]:
    for key in ("reasoning_content", "content"):
        content = message.get(key)
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (
                part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {} if isinstance(call, dict) else {}
        arguments = function.get("arguments", "")
        yield f"{function.get('name', '')} {arguments if isinstance(arguments, str) else json.dumps(arguments)}"


def searchable_text(episode: Episode) -> str:
    """All messages of an episode, each once, and its failure."""
    pieces: list[str] = []
    for call in episode.tree.calls:
        pieces.extend(message_text(message) for message in call.new_messages)
        pieces.append(message_text(call.reply))
    if episode.failure is not None:
        pieces.append(f"{episode.failure.kind} {episode.failure.message}")
    return words("\n".join(pieces)[:_SEARCHED_CHARACTERS])


def words(text: str) -> str:
    """Text for the index: scripts written without spaces get one between characters, so parts can be found."""
    text = encodable(text)
    if text.isascii():
        return text
    return "".join(f" {character} " if character >= "\u2e80" else character for character in text)


def preview(episode: Episode) -> str:
    """The first words of the user's first message."""
    for call in episode.tree.calls:
        for message in call.new_messages:
            if message.get("role") == "user":
                return one_line(message_text(message))
    return ""


def one_line(text: str) -> str:
    """The first words of a text, without line breaks."""
    return encodable(" ".join(text[: 8 * _PREVIEW_CHARACTERS].split())[:_PREVIEW_CHARACTERS])


def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """A function from ids to the bytes of each, for any Hugging Face tokenizer. Readers of episodes then need none.

    Byte-level vocabularies give exact bytes (a token may be part of a character), SentencePiece ones their pieces.
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
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
