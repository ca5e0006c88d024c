"""The words of an episode: what the text filter searches, and one line for lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ajet.schema.episode import Episode

_SEARCHED_CHARACTERS = 200_000
"""A longer episode is searched up to here."""
_PREVIEW_CHARACTERS = 160


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
    """All its messages, each once, and its failure."""
    pieces: list[str] = []
    for call in episode.tree.calls:
        pieces.extend(message_text(message) for message in call.new_messages)
        pieces.append(message_text(call.reply))
    if episode.failure is not None:
        pieces.append(f"{episode.failure.kind} {episode.failure.message}")
    return words("\n".join(pieces)[:_SEARCHED_CHARACTERS])


def words(text: str) -> str:
    """Text for the index: scripts written without spaces get one between characters, so that parts are found."""
    text = text.encode("utf-8", "replace").decode("utf-8")
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
    return " ".join(text[: 8 * _PREVIEW_CHARACTERS].split())[:_PREVIEW_CHARACTERS].encode("utf-8", "replace").decode()
