"""What a model wrote, read: `ParsedReply`. And `ModelMessage`, a message that knows what its call cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ajet.schema.trajectory import StopReason, Usage

NO_ANSWER: Mapping[str, StopReason] = {
    **dict.fromkeys(("length", "max_tokens", "model_length", "model_context_window_exceeded"), StopReason.REPLY_CUT),
    **dict.fromkeys(("content_filter", "refusal", "sensitive"), StopReason.REFUSED),
}
"""The finish reasons of replies that are no answer, as servers spell them."""
UNFINISHED = frozenset({"abort", "aborted", "error", "network_error", "insufficient_system_resource", "pause_turn"})
"""The finish reasons with which a server says that it gave up."""


class ModelMessage(dict[str, Any]):
    """An assistant message, as a plain dict, with what is known about its call besides."""

    usage: Usage | None = None
    finish_reason: str = "stop"
    reply_id: str = ""
    malformed: tuple[str, ...] = ()
    """What the server's parser could not read of the model's tool calls."""

    @property
    def no_answer(self) -> StopReason | None:
        """Why it is no answer, whatever it says. None: nothing speaks against it."""
        return StopReason.REFUSED if self.get("refusal") else NO_ANSWER.get(self.finish_reason)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call, as the model asked for it."""

    name: str
    arguments: str | dict[str, Any]
    """Text, if the model wrote text: whether it is JSON that fits the schema is found out when the tool is called."""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply: tool calls, or an answer, or something that can't be read."""

    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    problem: str = ""
    """What the model is told if its reply can't be read: what was expected, and how to write it."""


def joined_text(content: Any) -> Any:
    """The text of a list of text parts; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content
