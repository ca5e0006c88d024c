"""Agents by name: what `rollout.agent.type` and `ajet rollout --agent` may say besides `module->Class`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from ajet.agents.agent import Agent
from ajet.agents.limits import AgentSettingsError
from ajet.config.kinds import AGENTS, load, nearest_name
from ajet.schema.user_code import ARROW, load_symbol

AgentClass = TypeVar("AgentClass", bound=type[Agent])
_REGISTERED: dict[str, type[Agent]] = {}


def register_agent(name: str) -> Callable[[AgentClass], AgentClass]:
    """Decorate an agent's class to give it a name, for this process."""

    def register(agent_class: AgentClass) -> AgentClass:
        if name in AGENTS or _REGISTERED.get(name, agent_class) is not agent_class:
            raise AgentSettingsError(f"there is an agent {name!r} already: choose another name")
        _REGISTERED[name] = agent_class
        return agent_class

    return register


def agent_names() -> list[str]:
    """All names, those that come with ajet first."""
    return [*AGENTS, *_REGISTERED]


def agent_class(name: str, base_dirs: Sequence[str | Path] = ()) -> type[Agent]:
    """The class of a name, or of `module->Class`. Raises AgentSettingsError or ImportPathError."""
    if name in AGENTS:
        ready: type[Agent] = load(AGENTS, name)
        return ready
    if name in _REGISTERED:
        return _REGISTERED[name]
    if ARROW in name:
        own: type[Agent] = load_symbol(name, base_dirs, expects=Agent)
        return own
    if name == "cli":
        raise AgentSettingsError(
            "agent 'cli' is a program: it needs a run's gateway and sandbox (rollout.agent in a YAML)"
        )
    hint = nearest_name(name, agent_names())
    raise AgentSettingsError(f"no agent {name!r}{hint}; there are: {', '.join(agent_names())}, module->Class")


def make_agent(name: str, options: Mapping[str, Any] | None = None, base_dirs: Sequence[str | Path] = ()) -> Agent:
    """An agent by name, with these options. Raises AgentSettingsError, ToolSetupError or ImportPathError."""
    made_of = agent_class(name, base_dirs)
    options = dict(options or {})
    known = option_names(made_of)
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(known)}"
            raise AgentSettingsError(f"agent {name!r} has no option {option!r}; {hint}")
    if "base_dirs" in known:
        options["base_dirs"] = base_dirs
    return made_of(**options)


def option_names(of: type[Agent]) -> list[str]:
    """The arguments of an agent's constructor, those that it passes on to `Agent` included."""
    names: dict[str, None] = {}
    for level in of.__mro__:
        if "__init__" not in vars(level):
            continue
        parameters = list(inspect.signature(vars(level)["__init__"]).parameters.values())[1:]
        names.update(dict.fromkeys(entry.name for entry in parameters if entry.kind is not entry.VAR_KEYWORD))
        if not any(entry.kind is entry.VAR_KEYWORD for entry in parameters):
            break
    return list(names)
