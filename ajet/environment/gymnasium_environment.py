"""`GymnasiumEnvironment`: any environment of gymnasium, played in words.

Its spaces are described to the agent, observations are written out, and actions are read from the reply. A reply that
holds no fitting action doesn't reach the environment: the agent is told what would fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ajet.environment.environment import Action, Environment, StepResult, action_text
from ajet.environment.spaces import SpaceError, describe_space, fitting_action, plain_value, unsupported, value_text
from ajet.schema.errors import ConfigError, EnvironmentFault, MissingDependencyError
from ajet.schema.install import install_command
from ajet.schema.task import Task

OWN_OPTIONS = ("action_names", "instructions")
"""Options that are ours; the others go to `gymnasium.make`."""
SPLITS = {"train": 0}
TASKS_PER_SPLIT = 1000
OTHER_SPLITS = 1_000_000
"""The first seed of every split but `train`."""


class GymnasiumSource:
    """Environments of one gymnasium id."""

    def __init__(self, env_id: str, options: Mapping[str, Any], key: str) -> None:
        self._id = env_id
        self._options = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
        self._names = _action_names(options.get("action_names"), key)
        self._instructions = options.get("instructions")
        self._check(key)

    @property
    def name(self) -> str:
        return f"gymnasium:{self._id}"

    @property
    def url(self) -> None:
        return None

    def make(self, episode_id: str) -> GymnasiumEnvironment:
        import gymnasium

        return GymnasiumEnvironment(gymnasium.make(self._id, **self._options), self._names, self._instructions)

    def abandon(self, episode_id: str) -> None:
        """The process held everything."""

    def task_ids(self, split: str) -> list[str]:
        """A thousand seeds."""
        first = SPLITS.get(split, OTHER_SPLITS)
        return [str(seed) for seed in range(first, first + TASKS_PER_SPLIT)]

    def _check(self, key: str) -> None:
        """Whether the environment can be made, and played in words."""
        try:
            import gymnasium
        except ImportError:
            raise MissingDependencyError(
                f"{key}: {self.name} needs the package gymnasium\n    {install_command('gymnasium')}"
            ) from None
        try:
            env = gymnasium.make(self._id, **self._options)
        except Exception as error:  # gymnasium and the environments raise whatever they like
            raise ConfigError(f"{key}: gymnasium can't make {self._id!r}: {type(error).__name__}: {error}") from error
        try:
            reasons = [("actions", unsupported(env.action_space))]
            if env.render_mode != "ansi":
                reasons.append(("observations", unsupported(env.observation_space)))
            for what, reason in reasons:
                if reason:
                    raise ConfigError(
                        f"{key}: the {what} of {self._id} can't be put into words: {reason}\n    write an Environment "
                        "of your own around it, or choose an environment with text or few numbers"
                    )
        finally:
            env.close()


def _action_names(given: Any, key: str) -> dict[str, int]:
    """Name → number, from a list of names or a mapping of numbers to names."""
    if given is None:
        return {}
    pairs = given.items() if isinstance(given, Mapping) else enumerate(given) if isinstance(given, list) else None
    if pairs is None:
        raise ConfigError(f"{key}: options.action_names should be a list of names, or a mapping of numbers to names")
    try:
        return {str(name): int(number) for number, name in pairs}
    except ValueError:
        raise ConfigError(f"{key}: options.action_names should map numbers to names, as in {{0: left}}") from None


class GymnasiumEnvironment(Environment):
    """One environment of gymnasium. The task's seed is `metadata.seed`, or its id if that is a number, or its hash."""

    def __init__(self, env: Any, action_names: Mapping[str, int], instructions: str | None) -> None:
        self._env = env
        self._names = action_names
        self._instructions = instructions
        self._wanted = describe_space(env.action_space, action_names)

    def reset(self, task: Task) -> str:
        observation, _ = self._env.reset(seed=task_seed(task))
        about = self._instructions or self._about()
        return f"{about}\n\nAnswer with your action: {self._wanted}.\n\n{self._seen(observation)}"

    def step(self, action: Action) -> StepResult:
        try:
            value = fitting_action(self._env.action_space, action_text(action), self._names)
        except SpaceError as error:
            told = f"That is no action here: {error}. Nothing happened. Answer with {self._wanted}."
            return StepResult(told, info={"invalid_action": True})
        observation, reward, terminated, truncated, info = self._env.step(value)
        known = {name: plain_value(item) for name, item in info.items()}
        known |= {"terminated": bool(terminated), "truncated": bool(truncated)}
        return StepResult(self._seen(observation), reward, bool(terminated or truncated), known)

    def close(self) -> None:
        self._env.close()

    def _about(self) -> str:
        spec = self._env.spec
        if self._env.render_mode == "ansi":
            return f"You act in the environment {spec.id}."
        space = describe_space(self._env.observation_space, {})
        return f"You act in the environment {spec.id}. Each observation is {space}."

    def _seen(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            picture = self._env.render()
            if not isinstance(picture, str):
                raise EnvironmentFault(f"render() returned {type(picture).__name__} instead of text")
            return picture
        return f"Observation: {value_text(observation)}"


def task_seed(task: Task) -> int:
    """The seed of a task: the same task is the same world."""
    given = task.metadata.get("seed", task.task_id)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    text = str(given)
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
