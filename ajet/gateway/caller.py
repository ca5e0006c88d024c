"""`Caller`: who asks an endpoint for something."""

from __future__ import annotations

from dataclasses import dataclass

from ajet.session import EpisodeSession


@dataclass(frozen=True, slots=True)
class Caller:
    """An episode, and which of its agents."""

    session: EpisodeSession
    agent: str | None = None
    """None: the request's `model` says it (`ajet/<agent>`)."""
    target: str | None = None
