"""`EnvironmentSource`: where a run's environments come from, and `find_source`, which reads that from settings.

A source is found before a run starts, and raises a `UserError` if it can't work. It makes one environment per episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ajet.config.kinds import ENVIRONMENT_PROTOCOLS, ENVIRONMENTS, load
from ajet.environment.environment import Environment
from ajet.schema.errors import ConfigError, ImportPathError
from ajet.schema.user_code import ARROW, load_symbol

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


class EnvironmentSource(Protocol):
    """Makes the environments of a run."""

    @property
    def name(self) -> str:
        """What the user calls it."""
        ...

    @property
    def url(self) -> str | None:
        """Where its service answers, if it has one."""
        ...

    def make(self, episode_id: str) -> Environment:
        """A fresh environment for one episode."""
        ...

    def abandon(self, episode_id: str) -> None:
        """Free what an episode may have left behind outside of its process. Never raises, and returns soon."""
        ...

    def task_ids(self, split: str) -> list[str]:
        """The tasks that it offers."""
        ...


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
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{key}: an address ends with its path, and holds no user\n    write http://host:port/path")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(
            f"{key}: `api_key` holds a line break or another character that no header can\n    write the key alone, "
            "without the end of the line that it was read from"
        )


class ClassSource:
    """Environments of the user's own class."""

    def __init__(self, text: str, options: Mapping[str, Any], key: str, base_dirs: Sequence[Path] = ()) -> None:
        try:
            self.environment_class: type[Environment] = load_symbol(text, base_dirs, expects=Environment)
        except ImportPathError as error:
            raise ImportPathError(f"{key}: {error}") from error
        try:
            inspect.signature(self.environment_class).bind(**options)
        except TypeError as error:
            raise ConfigError(
                f"{key}: `options` don't fit {self.name}{_parameters(self.environment_class)}: {error}"
            ) from None
        self._options = dict(options)

    @property
    def name(self) -> str:
        return self.environment_class.__name__

    @property
    def url(self) -> None:
        return None

    def make(self, episode_id: str) -> Environment:
        return self.environment_class(**self._options)

    def abandon(self, episode_id: str) -> None:
        """The process held everything."""

    def task_ids(self, split: str) -> list[str]:
        return [str(task_id) for task_id in self.environment_class.task_ids(split)]


def _parameters(environment_class: type[Environment]) -> str:
    return str(inspect.signature(environment_class)).partition(" ->")[0]
