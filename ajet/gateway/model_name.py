"""The requested `model`: which agent is calling, and whether the call may be trained."""

from __future__ import annotations

from typing import Any, NamedTuple

from ajet.gateway import fields
from ajet.gateway.caller import MODEL_PREFIX, Caller, KeyScopeError
from ajet.gateway.fields import BadField
from ajet.schema.chat import DEFAULT_AGENT

_PREFIXES = (MODEL_PREFIX, "ajet/")
"""The second for old clients: many take what comes before a slash for a provider's name."""
AGENT_HEADER = b"x-ajet-agent"
"""The same for clients whose model name is fixed."""
MAX_AGENT_NAME = 200


class RequestedModel(NamedTuple):
    """Whom a request is for."""

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
