"""`Caller`: who sends a request, and which model it asks for, as its key, its agent header and its model name say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ajet.gateway import fields
from ajet.gateway.chat import EpisodeSession
from ajet.gateway.fields import BadField
from ajet.schema.chat import DEFAULT_AGENT
from ajet.schema.errors import InvalidRequestError
from ajet.system.http_messages import InvalidKeyError, narrow

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
    """The agent and target of a key made by `agent_key`. Raises InvalidKeyError for any other scope: a holder of the
    episode's key can write anything into it."""
    match scope:
        case None:
            return None, None
        case [str(agent), str(target)]:
            return agent, target
    raise InvalidKeyError("this key's scope is not [agent, target]")


def agent_key(episode_key: str, agent: str, target: str) -> str:
    """A key for one agent of the episode alone. Anyone who holds the episode's key can make it."""
    return narrow(episode_key, [agent, target])


_PREFIXES = (MODEL_PREFIX, "ajet/")
"""The second for old clients: many take what comes before a slash for a provider's name."""
AGENT_HEADER = b"x-ajet-agent"
"""Names the agent for clients whose model name is fixed."""
MAX_AGENT_NAME = 200


class RequestedModel(NamedTuple):
    """The model and the agent that a request names."""

    name: str
    """As the client wrote it."""
    agent: str
    trainable: bool | None
    """False: `rollout.untrained_models` says so. None: not decided here."""


def read_model(body: dict[str, Any], caller: Caller) -> RequestedModel:
    """The agent is the key's or the header's, else the one in the model's name."""
    name = fields.text(body, "model", MODEL_PREFIX + (caller.agent or DEFAULT_AGENT))
    named = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), "")
    if len(named) > MAX_AGENT_NAME:
        raise BadField("model", f"an agent's name has at most {MAX_AGENT_NAME} characters")
    trainable = False if caller.session.settings.untrained_model(name) else None
    if caller.agent is None:
        return RequestedModel(name, caller.named or named or DEFAULT_AGENT, trainable)
    if foreign := next((other for other in (caller.named, named) if other not in ("", caller.agent)), ""):
        raise KeyScopeError(f"this key is for agent {caller.agent!r} only, not for {foreign!r}")
    return RequestedModel(name, caller.agent, trainable)


def read_agent_header(value: bytes) -> str:
    """The agent that the header names; an empty string without one."""
    try:
        name = value.strip().decode()
    except UnicodeDecodeError:
        raise BadField(AGENT_HEADER.decode(), f"{AGENT_HEADER.decode()} is not UTF-8") from None
    if len(name) > MAX_AGENT_NAME:
        raise BadField(AGENT_HEADER.decode(), f"an agent's name has at most {MAX_AGENT_NAME} characters")
    return name
