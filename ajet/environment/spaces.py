"""Spaces of gymnasium in words: described, written out, and read from a reply.

Works on the names and attributes of spaces, so gymnasium itself isn't imported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_NUMBERS = 256
"""A longer observation or action is no text that a model could use."""
DIGITS = 4
"""Decimals of the numbers in an observation."""
MAX_DIGITS = 18
MAX_REPLY = 100_000
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MARK = re.compile(r"action\s*[:=]\s*", re.IGNORECASE)


class SpaceError(ValueError):
    """A reply without an action that fits. The message is for the agent."""


def unsupported(space: Any) -> str | None:
    """Why a space can't be put into words, or None if it can."""
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
    """An observation written out."""
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
    if not _contains(space, value):
        raise SpaceError(f"{value_text(value)[:60]} is outside of what is allowed")
    return value


def marked_action(reply: str) -> str:
    """What follows the last "Action:" in a reply, or else the whole reply."""
    return _MARK.split(reply[-MAX_REPLY:])[-1].strip().strip("`").strip()


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
        if space.dtype.kind in "iu" and (array != np.round(array)).any():
            raise SpaceError("whole numbers are needed")
        return array.astype(space.dtype)
    if kind == "Discrete":
        if isinstance(given, bool) or not isinstance(given, int | float) or given != int(given):
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


def _contains(space: Any, value: Any) -> bool:
    return bool(space.contains(value))


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
