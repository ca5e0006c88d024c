"""Reads a request's JSON: each function checks one field, and its error names the field."""

from __future__ import annotations

import math
from typing import Any

from ajet.gateway.body_shape import Refused, read_json
from ajet.gateway.body_shape import kind as kind
from ajet.schema.errors import InvalidRequestError


class BadField(InvalidRequestError):
    """One field of a request is wrong; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def json_body(body: bytes) -> dict[str, Any]:
    """The request's JSON object."""
    try:
        return read_json(body)
    except Refused as error:
        raise BadField("body", str(error)) from None


def number(body: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadField(key, f"{key} must be a number, not {kind(value)}")
    if not (low <= value <= high) or not math.isfinite(value):
        said = f"{value:g}" if isinstance(value, float) or abs(value) < 10**15 else "that"
        raise BadField(key, f"{key} must be from {low:g} to {high:g}, not {said}")
    return float(value)


def integer(body: dict[str, Any], key: str, low: int, high: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadField(key, f"{key} must be an integer, not {kind(value)}")
    if not low <= value <= high:
        raise BadField(key, f"{key} must be from {low} to {high}")
    return value


def flag(body: dict[str, Any], key: str, default: bool = False) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadField(key, f"{key} must be a boolean, not {kind(value)}")
    return value


def text(body: dict[str, Any], key: str, default: str = "") -> str:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise BadField(key, f"{key} must be a string, not {kind(value)}")
    return value


def mapping(body: dict[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadField(key, f"{key} must be an object, not {kind(value)}")
    return value


def array(body: dict[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadField(key, f"{key} must be an array, not {kind(value)}")
    return value


def strings(body: dict[str, Any], key: str, most: int) -> tuple[str, ...]:
    """A string or a list of strings."""
    value = body.get(key)
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise BadField(key, f"{key} must be a non-empty string or a list of them")
    if len(values) > most:
        raise BadField(key, f"{key} takes at most {most} strings")
    return tuple(values)
