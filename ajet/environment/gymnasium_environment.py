"""`GymnasiumEnvironment`: lets an agent play any gymnasium environment, whose spaces become text here."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ajet.environment.environment import Action, Environment, EnvironmentSource, StepResult, action_text
from ajet.schema.errors import ConfigError, EnvironmentFault, MissingDependencyError
from ajet.schema.install import install_command
from ajet.schema.task import Task

MAX_NUMBERS = 256
"""A longer observation or action would be useless as text."""
DIGITS = 4
"""Decimals of the numbers in an observation."""
MAX_DIGITS = 18
MAX_REPLY = 100_000
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MARK = re.compile(r"action\s*:\s*", re.IGNORECASE)
_FENCED = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)


class SpaceError(ValueError):
    """A reply without a valid action. The message is for the agent."""


def unsupported(space: Any) -> str | None:
    """Why a space can't be described as text, or None if it can."""
    kind = type(space).__name__
    if kind in ("Discrete", "Text", "MultiDiscrete", "MultiBinary", "Box"):
        size = math.prod(space.shape or ()) if kind not in ("Discrete", "Text") else 1
        return f"an array of shape {tuple(space.shape)}" if size > MAX_NUMBERS else None
    if kind == "Tuple":
        return next((reason for part in space.spaces if (reason := unsupported(part))), None)
    if kind == "Dict":
        return next((reason for part in space.spaces.values() if (reason := unsupported(part))), None)
    return f"a space of type {kind}"


def describe_space(space: Any, names: Mapping[str, int]) -> str:
    """A space in words, as in "a whole number from 0 to 3"."""
    kind = type(space).__name__
    if kind == "Discrete":
        first, last = int(space.start), int(space.start) + int(space.n) - 1
        if names:
            return "one of these words: " + ", ".join(names)
        return f"a whole number from {first} to {last}"
    if kind == "Text":
        return f"text of {space.min_length} to {space.max_length} characters"
    if kind == "MultiBinary":
        return f"a list of {_shape(space.shape)} numbers, each 0 or 1"
    if kind == "MultiDiscrete":
        ends = ", ".join(str(int(n) - 1) for n in space.nvec.reshape(-1))
        return f"a list of {_shape(space.shape)} whole numbers from 0, at most {ends}"
    if kind == "Box":
        kind_of_number = "whole number" if space.dtype.kind in "iu" else "number"
        if math.prod(space.shape) == 1:
            return f"a {kind_of_number}{_bounds(space)}"
        return f"a list of {_shape(space.shape)} {kind_of_number}s{_bounds(space)}"
    if kind == "Tuple":
        return "a list of: " + "; ".join(describe_space(part, {}) for part in space.spaces)
    if kind == "Dict":
        return "a JSON object with " + "; ".join(
            f'"{name}": {describe_space(part, {})}' for name, part in space.spaces.items()
        )
    return f"a value of {kind}"


def value_text(value: Any) -> str:
    """Format an observation as text."""
    plain = plain_value(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def fitting_action(space: Any, reply: str, names: Mapping[str, int]) -> Any:
    """The action in a reply: what follows the last "Action:", or else the whole reply. Raises SpaceError."""
    text = marked_action(reply)
    if not text:
        raise SpaceError("the reply is empty")
    kind = type(space).__name__
    if kind == "Text":
        value: Any = text
    elif kind == "Discrete" and names:
        value = _named(text, names)
    elif kind == "Discrete":
        numbers = _NUMBER.findall(text)
        if not numbers:
            raise SpaceError(f"there is no number in {text[:60]!r}")
        if "." in numbers[-1] or len(numbers[-1]) > MAX_DIGITS:
            raise SpaceError(f"{numbers[-1]:.20} is not a whole number that fits")
        value = int(numbers[-1])
    else:
        value = _structured(space, text)
    if not space.contains(value):
        raise SpaceError(f"{value_text(value)[:60]} is outside of what is allowed")
    return value


def marked_action(reply: str) -> str:
    """The text after the last "Action:" in a reply, or else the whole reply; without the fence around it. In a fence,
    as in code, the word marks nothing."""
    text = reply[-MAX_REPLY:]
    fences = [found.span() for found in _FENCED.finditer(text)]
    marks = [mark.end() for mark in _MARK.finditer(text) if not any(a < mark.start() < b for a, b in fences)]
    text = text[marks[-1] if marks else 0 :].strip()
    fenced = _FENCED.fullmatch(text)
    return (fenced[1] if fenced else text).strip().strip("`").strip()


def _named(text: str, names: Mapping[str, int]) -> int:
    """The action whose name occurs last in the text."""
    best: tuple[int, int] | None = None
    for name, number in names.items():
        for found in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE):
            if best is None or found.start() > best[0]:
                best = found.start(), number
    if best is None:
        raise SpaceError(f"none of {', '.join(names)} is in {text[:60]!r}")
    return best[1]


def _structured(space: Any, text: str) -> Any:
    """A value of a composite space, from JSON."""
    kind = type(space).__name__
    start = min((at for at in (text.find("["), text.find("{")) if at >= 0), default=-1)
    end = max(text.rfind("]"), text.rfind("}"))
    try:
        data = json.loads(text[start : end + 1]) if 0 <= start < end else json.loads(text)
    except (ValueError, RecursionError):
        numbers = _NUMBER.findall(text)
        if kind not in ("Box", "MultiDiscrete", "MultiBinary") or not numbers:
            raise SpaceError(f"{text[:60]!r} is not JSON") from None
        data = [float(number) for number in numbers]
    return _value(space, data)


def _value(space: Any, given: Any) -> Any:
    """JSON data as a value of a space."""
    kind = type(space).__name__
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        import numpy as np

        if isinstance(given, dict | bool):
            raise SpaceError("a list of numbers is needed")
        try:
            array = np.asarray(given, dtype=np.float64).reshape(space.shape)
        except (ValueError, TypeError, OverflowError):
            raise SpaceError(f"a list of {_shape(space.shape)} numbers is needed") from None
        if not np.isfinite(array).all():
            raise SpaceError("the numbers must be finite")
        if space.dtype.kind in "iu":
            limits = np.iinfo(space.dtype)  # beyond them, a number would become another: 257 would be 1 in 8 bits
            if (array != np.round(array)).any() or (array < limits.min).any() or (array > limits.max).any():
                raise SpaceError(f"whole numbers from {limits.min} to {limits.max} are needed")
        return array.astype(space.dtype)
    if kind == "Discrete":
        whole = isinstance(given, int) or (isinstance(given, float) and given.is_integer())
        if isinstance(given, bool) or not whole:
            raise SpaceError(f"{given!r:.60} is not a whole number")
        return int(given)
    if kind == "Tuple":
        if not isinstance(given, list) or len(given) != len(space.spaces):
            raise SpaceError(f"a list of {len(space.spaces)} values is needed")
        return tuple(_value(part, item) for part, item in zip(space.spaces, given, strict=True))
    if kind == "Dict":
        if not isinstance(given, dict) or given.keys() != space.spaces.keys():
            raise SpaceError(f"a JSON object with the keys {', '.join(space.spaces)} is needed")
        return {name: _value(part, given[name]) for name, part in space.spaces.items()}
    return given


def plain_value(value: Any) -> Any:
    """A value of a space as JSON data, its numbers rounded."""
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        value = value.tolist()
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        rounded = round(value, DIGITS) if math.isfinite(value) else None
        return int(rounded) if rounded is not None and rounded == int(rounded) else rounded
    if isinstance(value, Mapping):
        return {str(name): plain_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return str(value)


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) if shape else "1"


def _bounds(space: Any) -> str:
    low, high = space.low.reshape(-1).tolist(), space.high.reshape(-1).tolist()
    if len(set(low)) == 1 and len(set(high)) == 1:
        return f" between {_bound(low[0])} and {_bound(high[0])}" if abs(low[0]) < 1e30 or abs(high[0]) < 1e30 else ""
    if len(low) > 16:
        return ""
    pairs = (f"{_bound(a)} to {_bound(b)}" for a, b in zip(low, high, strict=True))
    return f", from {'; '.join(pairs)}"


def _bound(number: float) -> str:
    return "anything" if abs(number) > 1e30 else f"{number:g}"


OWN_OPTIONS = ("action_names", "instructions")
"""Options that AgentJet handles; the others go to `gymnasium.make`."""
TASKS_PER_SPLIT = 1000
OTHER_SPLITS = 1_000_000
"""The first seed of every split but `train`."""


class GymnasiumSource(EnvironmentSource):
    """Environments of one gymnasium id."""

    def __init__(self, env_id: str, options: Mapping[str, Any], key: str) -> None:
        self._id = env_id
        self.name = f"gymnasium:{env_id}"
        self._options = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
        self._names = _action_names(options.get("action_names"), key)
        self._instructions = options.get("instructions")
        self._check(key)

    def make(self, episode_id: str) -> GymnasiumEnvironment:
        import gymnasium

        return GymnasiumEnvironment(gymnasium.make(self._id, **self._options), self._names, self._instructions)

    def task_ids(self, split: str) -> list[str]:
        """A thousand seeds."""
        first = 0 if split == "train" else OTHER_SPLITS
        return [str(seed) for seed in range(first, first + TASKS_PER_SPLIT)]

    def _check(self, key: str) -> None:
        """Raise unless the environment can be created and played as text."""
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
