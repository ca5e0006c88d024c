"""`Context`: what a request is carried out with, who asked, and what a repeated request was answered before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ajet.store.errors import NotAllowedError
from ajet.store.requests import Role
from ajet.store.tables import Tables


class AnsweredMeanwhile(Exception):
    """The same request was answered by another transaction: undo this one, and read that answer."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key sent a request. Programs that hold the store itself have none."""

    name: str
    roles: frozenset[Role]

    @property
    def sees_own_only(self) -> bool:
        return self.roles == {Role.RUNNER}


@dataclass(frozen=True, slots=True)
class Context:
    """What a request is carried out with."""

    tables: Tables
    now: float
    listening_since: float
    """When the store opened: before that, no runner could be heard."""
    caller: Caller | None = None

    def must_own(self, owner: str | None, rollout_id: str) -> None:
        if self.caller is not None and self.caller.sees_own_only and owner != self.caller.name:
            raise NotAllowedError(f"rollout {rollout_id} was not claimed with this key")

    @property
    def owner(self) -> str | None:
        return None if self.caller is None else self.caller.name


class Repeatable(Protocol):
    @property
    def request_id(self) -> str | None: ...


def _scoped(context: Context, request: Repeatable) -> str:
    """Two keys' requests of the same id are different requests, and so are requests of different kinds."""
    return f"{type(request).__name__} {context.owner or ''} {request.request_id}"


def answered(context: Context, request: Repeatable) -> Any:
    """What this request was answered before. None: it is new."""
    if request.request_id is None:
        return None
    answer = context.tables.answered(_scoped(context, request))
    return None if answer is None else msgspec.json.decode(answer)


def remember(context: Context, request: Repeatable, answer: Any) -> None:
    if request.request_id is None:
        return
    if not context.tables.remember(_scoped(context, request), msgspec.json.encode(answer), context.now):
        raise AnsweredMeanwhile
