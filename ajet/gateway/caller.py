"""`Caller`: who sends a request, and the keys that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ajet.gateway.chat import EpisodeSession
from ajet.schema.errors import InvalidRequestError
from ajet.system.access import InvalidKeyError, narrow

MODEL_PREFIX = "ajet-"
"""`model: ajet-<agent>` in a request names the agent."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An episode's session, and which of its agents is calling."""

    session: EpisodeSession
    agent: str | None = None
    """None: the request names it."""
    target: str | None = None
    named: str = ""
    """The agent that the request's header names."""
    control: bool = False
    """It was sent with the episode's control key, which gives rewards and can't call the model."""


class KeyScopeError(InvalidRequestError):
    """A valid key, but not for this."""

    http_status = 403
    code = "permission_denied"
    error_type = "permission_error"


def agent_scope(scope: Any) -> tuple[str | None, str | None]:
    """Agent and target of the key that `agent_key` made; whoever holds the episode's key can write anything into it."""
    match scope:
        case None:
            return None, None
        case [str(agent), str(target)]:
            return agent, target
    raise InvalidKeyError("this key's scope is not [agent, target]")


def agent_key(episode_key: str, agent: str, target: str) -> str:
    """A key for one agent of the episode alone. Anyone who holds the episode's key can make it."""
    return narrow(episode_key, [agent, target])
