"""`AgentLimits`: how long an agent may go on; `ContextWindow`: what it does when the model's context is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ajet.agents.model_function import Message
from ajet.schema.errors import UserError


class AgentSettingsError(UserError):
    """Settings of an agent that make no sense."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Where a run of an agent ends, whatever the model does. None: no limit."""

    max_steps: int = 10
    """Model calls, summaries not counted."""
    max_tokens: int | None = None
    """Tokens of all replies together."""
    max_seconds: float | None = None
    max_output_chars: int = 20_000
    """The limit for one tool call's output, as the model sees it."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            kind = float | int if entry.name == "max_seconds" else int
            if value is not None and not (isinstance(value, kind) and not isinstance(value, bool) and value > 0):
                what = "number" if entry.name == "max_seconds" else "whole number"
                raise AgentSettingsError(f"{entry.name}: {value!r} is not allowed: give a {what} above 0")


WhenFull = Literal["drop", "summarise", "stop"]
FULL_SHARE = 0.8
"""The usable share of the window: the rest is for the reply and for the error of the estimate."""
ROOM_SHARE = 0.5
"""Down to which share of the window old tool output is dropped: dropping a little each time would make each call a
branch of its own, which no engine can reuse."""
KEEP_LAST = 2
"""Messages at the end that are never touched: what the model is working on."""
SUMMARISE = (
    "The conversation is about to exceed your context window. Write down, for yourself, what the task is, what you "
    "have done and found out, and what remains to be done. Nothing else of this conversation will be kept."
)


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """How much fits, and what to do about it."""

    tokens: int | None = None
    """The model's window. None: unknown, so nothing is done until the model refuses."""
    when_full: WhenFull = "drop"
    """`drop`: leave out old tool output; `summarise`: ask the model for a summary and go on from it; `stop`."""

    def __post_init__(self) -> None:
        if self.when_full not in get_args(WhenFull):
            raise AgentSettingsError(f"when_full: {self.when_full!r} is not one of {', '.join(get_args(WhenFull))}")
        if self.tokens is not None and self.tokens < 1:
            raise AgentSettingsError(f"context_tokens: {self.tokens} is not allowed: give a number above 0")

    def is_full(self, prompt_tokens: int) -> bool:
        """Whether a prompt of about this size leaves too little room."""
        return self.tokens is not None and prompt_tokens > FULL_SHARE * self.tokens

    def without_old_output(self, messages: Sequence[Message], prompt_tokens: int) -> list[Message] | None:
        """The conversation with its oldest tool output left out, as much as is needed. None: there is none to leave
        out."""
        assert self.tokens is not None
        kept = list(messages)
        characters = sum(len(_text(message)) for message in messages)
        per_character = prompt_tokens / max(1, characters)
        excess = (prompt_tokens - ROOM_SHARE * self.tokens) / per_character
        saved = 0.0
        for index, message in enumerate(messages[: len(messages) - KEEP_LAST]):
            if saved >= excess:
                break
            shorter = _dropped(message)
            if shorter is not None:
                saved += len(_text(message)) - len(_text(shorter))
                kept[index] = shorter
        return kept if saved > 0 else None

    @staticmethod
    def after_summary(messages: Sequence[Message], summary: str) -> list[Message]:
        """The system prompt, the task, and the summary in place of everything since."""
        opening = list(messages[: _opening(messages)])
        note = f"What has been done so far, in your own words:\n\n{summary}\n\nGo on from here."
        if opening and opening[-1].get("role") == "user":  # many templates want users and assistants in turn
            return [*opening[:-1], {**opening[-1], "content": f"{_text(opening[-1])}\n\n{note}"}]
        return [*opening, {"role": "user", "content": note}]


def _opening(messages: Sequence[Message]) -> int:
    """How many messages come before the model's first."""
    roles = [message.get("role") for message in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def _dropped(message: Message) -> Message | None:
    """The message with its tool output left out. None: it holds none, or too little to be worth it."""
    text = _text(message)
    is_output = message.get("role") == "tool" or (message.get("role") == "user" and text.startswith("Observation"))
    note = f"(output of {len(text)} characters, left out to make room: call the tool again if you need it)"
    if not is_output or len(text) <= len(note) + 20:
        return None
    return {**message, "content": f"Observation: {note}" if message["role"] == "user" else note}


def _text(message: Message) -> str:
    content: Any = message.get("content")
    return content if isinstance(content, str) else ""
