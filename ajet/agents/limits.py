"""How long an agent may go on: `AgentLimits`."""

from __future__ import annotations

from dataclasses import dataclass, fields

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
    """Of one tool call's output, as the model sees it."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            kind = float | int if entry.name == "max_seconds" else int
            if value is not None and not (isinstance(value, kind) and not isinstance(value, bool) and value > 0):
                what = "number" if entry.name == "max_seconds" else "whole number"
                raise AgentSettingsError(f"{entry.name}: {value!r} is not allowed: give a {what} above 0")
