"""Errors of a store. Each has the HTTP status and the code by which a client recognises it."""

from __future__ import annotations

from typing import ClassVar

from ajet.schema.errors import UserError


class StoreError(UserError):
    """A request that a store refuses. The message says what to do about it."""

    http_status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"


class UnknownIdError(StoreError):
    """No such rollout, attempt or resources in this store."""

    http_status = 404
    code = "unknown_id"


class ConflictError(StoreError):
    """A valid request, but not in the state that the rollout is in."""

    http_status = 409
    code = "conflict"


class KeyRefusedError(StoreError):
    """No key, a wrong or an expired one."""

    http_status = 401
    code = "invalid_key"


class NotAllowedError(StoreError):
    """A valid key, but not for this."""

    http_status = 403
    code = "not_allowed"


class ProtocolMismatchError(StoreError):
    """Client and store speak different versions."""

    http_status = 426
    code = "protocol_mismatch"


class StoreUnavailableError(StoreError):
    """The store can't be reached, or can't write. Nothing was acknowledged; the client may try again."""

    http_status = 503
    code = "unavailable"


def error_of(code: str, message: str) -> StoreError:
    """The error that a store answered with."""
    kinds = {kind.code: kind for kind in StoreError.__subclasses__()}
    return kinds.get(code, StoreError)(message)
