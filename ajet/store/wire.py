"""A request as data: checked before it leaves this process, or before this process's own store gets it.

JSON knows no NaN and no infinity. A number that would become null on its way is refused instead.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from ajet.store.errors import StoreError
from ajet.store.requests import Request

T = TypeVar("T")

_NOT_FINITE = (b"\xcb\x7f\xf8", b"\xcb\x7f\xf0", b"\xcb\xff\xf8", b"\xcb\xff\xf0")
"""How NaN and infinities begin in msgpack. Other bytes may look so, too."""


def checked_copy(request: Request[T]) -> Request[T]:
    """What a store would get over HTTP."""
    kind = type(request)
    try:
        data = msgspec.msgpack.encode(request, enc_hook=_plain)
        copy: Request[T] = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise StoreError(f"{kind.__name__}: {error}") from None
    if any(mark in data for mark in _NOT_FINITE):
        _refuse_not_finite(msgspec.msgpack.decode(data), kind.__name__)
    return copy


def as_json(request: Request[Any]) -> bytes:
    """A checked request, for HTTP."""
    return msgspec.json.encode(checked_copy(request))


def _refuse_not_finite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise StoreError(f"{where} is {value}: a store keeps finite numbers only")
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_not_finite(inner, f"{where}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_not_finite(inner, f"{where}[{index}]")


def _plain(value: Any) -> Any:
    """Values of numpy and torch, and pydantic models, as data."""
    for method in ("tolist", "model_dump"):
        if callable(found := getattr(value, method, None)):
            return found()
    raise NotImplementedError(f"{type(value).__name__} is not data that a store can keep")
