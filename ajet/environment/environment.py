"""`Environment`: a world that an agent acts in, for one episode; `find_source`: where a run's environments come from.

Subclass it and define `reset` and `step` (`def` or `async def`); `evaluate` and `close` if there is something to say or
to free. One object serves one episode at a time and never two. Below: actions and observations as messages and text.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ajet.config.kinds import ENVIRONMENT_PROTOCOLS, ENVIRONMENTS, load
from ajet.schema.errors import ConfigError, EnvironmentFault, ImportPathError, RewardError
from ajet.schema.task import Task, finite_reward, scalar
from ajet.schema.user_code import ARROW, load_symbol

Action = Any
"""Usually an assistant message (`{"role": "assistant", "content": …, "tool_calls": …}`) or a plain string."""
Observation = Any
"""Usually a string, a message, or a list of messages: what the agent sees next."""


@dataclass(slots=True)
class StepResult:
    """What an action led to. It also unpacks: `observation, reward, done, info = result`."""

    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.observation, self.reward, self.done, self.info))


class Environment:
    """The base class of environments."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that it offers to a ready agent, in OpenAI's form. A call of one arrives at `step` as a message with
    `tool_calls`."""

    @staticmethod
    def task_ids(split: str) -> Iterable[str]:
        """The ids of the tasks that a server of this environment offers in a split (`train`, `dev`, …)."""
        return []

    def reset(self, task: Task) -> Any:
        """Begin the task, and return the first observation."""
        raise NotImplementedError(f"{type(self).__name__} must define `reset(self, task)`")

    def step(self, action: Action) -> Any:
        """Act, and return a `StepResult` or the tuple (observation, reward, done, info)."""
        raise NotImplementedError(f"{type(self).__name__} must define `step(self, action)`")

    def evaluate(self) -> Any:
        """The whole episode's reward. If a class doesn't define it, that is the sum of the steps' rewards."""
        return None

    def close(self) -> Any:
        """Free what the episode holds. Called once, whatever happened; from another thread if a step hangs."""


def checked_first(value: Any, where: str) -> Observation:
    """What a `reset` returned. Raises EnvironmentFault if it is gymnasium's pair, whose second part the model would be
    shown."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        raise EnvironmentFault(f"{where} returned {value!r:.80}: return the observation alone, without info")
    return value


def checked_step(value: Any, where: str) -> StepResult:
    """What a `step` returned, as a `StepResult` with a finite reward. Raises EnvironmentFault, which begins with
    `where`."""
    if isinstance(value, tuple) and len(value) == 4:
        value = StepResult(*value)
    if not isinstance(value, StepResult):
        raise EnvironmentFault(
            f"{where} returned {value!r:.80} of type {type(value).__name__}, "
            "not a StepResult or (observation, reward, done, info)"
        )
    done = scalar(value.done)
    if not isinstance(done, bool):
        raise EnvironmentFault(f"{where} returned done={done!r:.80} of type {type(done).__name__}, not a bool")
    if not isinstance(value.info, dict):
        raise EnvironmentFault(f"{where} returned info of type {type(value.info).__name__}, not a dict")
    return StepResult(value.observation, checked_reward(value.reward, where), done, value.info)


def checked_reward(value: Any, where: str, fault: type[EnvironmentFault] = EnvironmentFault) -> float:
    """A reward from an environment as a finite float. Raises `fault`."""
    try:
        value = scalar(value)
        return finite_reward(float(value) if isinstance(value, bool) else value, f"the reward from {where}")
    except RewardError as error:
        raise fault(str(error)) from None


NOTHING_OBSERVED = "(The environment answered with nothing.)"
"""The message that replaces an empty observation: an empty message helps no model."""


def observed(observation: Observation) -> Observation:
    """An observation, or `NOTHING_OBSERVED` in place of an empty one. 0 and False are something."""
    empty = observation is None or (isinstance(observation, str | list | dict) and not observation)
    return NOTHING_OBSERVED if empty else observation


def action_message(action: Action) -> dict[str, Any]:
    """An action as an assistant message with text as its content."""
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    if hasattr(action, "model_dump"):  # a client's message object
        action = action.model_dump(exclude_none=True)
    if not isinstance(action, dict):
        return {"role": "assistant", "content": json.dumps(action, default=str)}
    message = {"role": "assistant", **action}
    said = _texts(message.get("content"))
    message["content"] = said[0] if said else ""  # as with AgentJet, of several parts the first
    return message


def action_text(action: Action) -> str:
    """The text of an action."""
    text: str = action_message(action)["content"]
    return text


def observation_messages(observation: Observation) -> list[dict[str, Any]]:
    """An observation as the messages that begin a conversation."""
    if isinstance(observation, list) and observation and all(_is_message(item) for item in observation):
        return [dict(item) for item in observation]
    if _is_message(observation):
        return [dict(observation)]
    return [{"role": "user", "content": observation_text(observation)}]


def observation_text(observation: Observation) -> str:
    """An observation as one text."""
    if isinstance(observation, str):
        return observation
    if _is_message(observation):
        return "\n".join(_texts(observation.get("content")))
    if isinstance(observation, list) and observation and all(_is_message(item) for item in observation):
        return "\n\n".join(map(observation_text, observation))
    return json.dumps(observation, ensure_ascii=False, default=str)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _texts(content: Any) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return [text for text in parts if isinstance(text, str)]
    if content is None or isinstance(content, str):
        return [content or ""]
    return [json.dumps(content, ensure_ascii=False, default=str)]


KEY = "ajet.rollout.environment"


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """What a YAML or command line says about environments. One of `source` and `url` is given."""

    source: str | None = None
    """`module->Class`, `path/file.py->Class` or `gymnasium:ID`."""
    url: str | None = None
    """Where an environment service answers."""
    protocol: str = "env_service"
    """What the server at `url` speaks: `env_service` or `openenv`."""
    env_type: str = "default"
    api_key: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    key: str = KEY
    """Where this was written, for error messages."""


class EnvironmentSource:
    """Makes the environments of a run."""

    name: str
    """What the user calls it."""

    def make(self, episode_id: str) -> Environment:
        """A fresh environment for one episode."""
        raise NotImplementedError

    def abandon(self, episode_id: str) -> None:
        """Free what an episode may have left behind outside of its process. Never raises, and returns soon."""

    def task_ids(self, split: str) -> list[str]:
        """The tasks that it offers."""
        return []


def find_source(settings: EnvironmentSettings, base_dirs: Sequence[Path] = ()) -> EnvironmentSource:
    """The source that the settings name. Raises a `UserError` that names `settings.key`."""
    if settings.url is not None:
        check_address(settings.url, settings.api_key, settings.key)
        served: EnvironmentSource = load(ENVIRONMENT_PROTOCOLS, settings.protocol)(settings)
        return served
    text = settings.source or ""
    kind, _, rest = text.partition(":")
    if kind in ENVIRONMENTS:
        made: EnvironmentSource = load(ENVIRONMENTS, kind)(rest, settings.options, settings.key)
        return made
    if ARROW not in text:
        raise ConfigError(
            f"{settings.key}: {text!r} names no environment\n    write `path/file.py->YourClass`, "
            "`gymnasium:CartPole-v1`, or `{url: http://host:port}` for a service"
        )
    return ClassSource(text, settings.options, settings.key, base_dirs)


def check_address(url: str, api_key: str | None, key: str) -> None:
    """Raises ConfigError, which names `key`, if a service can't be at this address or have this key."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port, or of brackets
        fits = False
    if not fits:
        raise ConfigError(f"{key}: {url!r} is not an address\n    write http://host:port")
    if parts.username is not None or parts.query or parts.fragment:  # which may be secret, and isn't repeated
        raise ConfigError(f"{key}: an address ends with its path, and holds no user\n    write http://host:port/path")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(
            f"{key}: `api_key` holds a line break or another character that no header can\n    write the key alone, "
            "without the end of the line that it was read from"
        )


class ClassSource(EnvironmentSource):
    """Environments of the user's own class."""

    def __init__(self, text: str, options: Mapping[str, Any], key: str, base_dirs: Sequence[Path] = ()) -> None:
        try:
            self.environment_class: type[Environment] = load_symbol(text, base_dirs, expects=Environment)
        except ImportPathError as error:
            raise ImportPathError(f"{key}: {error}") from error
        self.name = self.environment_class.__name__
        try:
            inspect.signature(self.environment_class).bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"{key}: `options` don't fit {self.name}{inspect.signature(self.environment_class)}: {error}"
            ) from None
        self._options = dict(options)

    def make(self, episode_id: str) -> Environment:
        return self.environment_class(**self._options)

    def task_ids(self, split: str) -> list[str]:
        return [str(task_id) for task_id in self.environment_class.task_ids(split)]
