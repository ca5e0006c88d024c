"""`plain`: what user code returned, as data that everything after it can handle.

Values that hold themselves, nest without end, are numbers too large for a float or texts of many megabytes become short
texts. Other objects stay as they are: they are written as their `repr`, which is tried here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_LEVELS = 32
MOST_VALUES = 100_000
MOST_CHARACTERS = 1_000_000
"""Of one text."""
LARGEST_BITS = 1000
"""Larger whole numbers don't fit into a float."""
TOO_MUCH = "(left out: more than is kept)"


def plain(value: Any) -> Any:
    """A copy of nested mappings and lists in which nothing is too deep, too many or too long."""
    return _Copy().of(value, MOST_LEVELS)


class _Copy:
    def __init__(self) -> None:
        self._left = MOST_VALUES

    def of(self, value: Any, levels: int) -> Any:
        self._left -= 1
        if self._left < 0 or (levels < 0 and isinstance(value, Mapping | list | tuple | set | frozenset)):
            return TOO_MUCH
        if isinstance(value, str):
            return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}… ({len(value)} characters)"
        if isinstance(value, bool | float) or value is None:
            return value
        if isinstance(value, int):
            return value if value.bit_length() <= LARGEST_BITS else f"(a whole number of {value.bit_length()} bits)"
        if isinstance(value, Mapping):
            return {self._key(key): self.of(item, levels - 1) for key, item in list(value.items())[:MOST_VALUES]}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.of(item, levels - 1) for item in list(value)[:MOST_VALUES]]
        return value if _can_be_shown(value) else f"(an object of type {type(value).__name__})"

    def _key(self, key: Any) -> str:
        return key[:MOST_CHARACTERS] if isinstance(key, str) else shown(key)


def _can_be_shown(value: Any) -> bool:
    try:
        return len(repr(value)) <= MOST_CHARACTERS
    except Exception:  # noqa: BLE001 - user code: whatever its `__repr__` raises, the value can't be shown
        return False


def shown(value: Any, most: int = 200) -> str:
    """The beginning of a value's `repr`, whatever that does."""
    try:
        return repr(value)[:most]
    except Exception:  # noqa: BLE001 - user code, as above
        return f"(an object of type {type(value).__name__})"
