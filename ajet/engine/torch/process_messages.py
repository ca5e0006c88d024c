"""What crosses between a program and its engine's process: msgpack over a socket pair, each message with its length.

Nothing else can connect to the sockets: they have no name, and the child inherits its end. No pickle.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from ajet.engine.torch.shared_weights import Placed
from ajet.schema import errors
from ajet.schema.errors import AjetError, EngineError, InvalidRequestError
from ajet.schema.generation import Completion, GenerateRequest

_LENGTH = struct.Struct("<Q")
MOST_BYTES = 1 << 30
"""Of a message: more than the longest reply with all its top log-probabilities."""

# ---------------------------------------------------------------- to the engine's process


class Start(msgspec.Struct, tag=True):
    """The first message: what to serve. `descriptor` is the weights' memory."""

    model: str
    settings: dict[str, Any]
    cpu_threads: int
    descriptor: int
    layout: list[Placed]
    version: int


class Ask(msgspec.Struct, tag=True):
    """Draw a reply. `streams`: somebody waits for the tokens one by one."""

    number: int
    request: msgspec.Raw
    """A `GenerateRequest`, read where a wrong one can be refused by its number."""
    streams: bool


class Drop(msgspec.Struct, tag=True):
    """Nobody waits for this reply any more."""

    number: int


class Serve(msgspec.Struct, tag=True):
    """The weights were changed in place, and are this version."""

    number: int
    version: int


class Count(msgspec.Struct, tag=True):
    """Tell the engine's counters."""

    number: int


Order = Start | Ask | Drop | Serve | Count

# ---------------------------------------------------------------- from the engine's process


class Up(msgspec.Struct, tag=True):
    """The model can be served."""


class Refused(msgspec.Struct, tag=True):
    """The model can't be served; the process ends."""

    kind: str
    message: str


class Said(msgspec.Struct, tag=True):
    """A warning of the engine, for the owner's log."""

    level: int
    message: str


class Tokens(msgspec.Struct, tag=True):
    number: int
    token_ids: list[int]
    logprobs: list[float]


class Reply(msgspec.Struct, tag=True):
    number: int
    completion: Completion


class Failed(msgspec.Struct, tag=True):
    number: int
    kind: str
    message: str


class Done(msgspec.Struct, tag=True):
    """An order other than `Ask` was carried out."""

    number: int
    counters: dict[str, int] = {}


Event = Up | Refused | Said | Tokens | Reply | Failed | Done

REQUESTS = msgspec.msgpack.Decoder(GenerateRequest)
ORDERS = msgspec.msgpack.Decoder(Order)
EVENTS = msgspec.msgpack.Decoder(list[Event])


def frame(message: Order | list[Event]) -> bytes:
    """A message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def packed(request: GenerateRequest) -> msgspec.Raw:
    """A request as `Ask` carries it."""
    try:
        return msgspec.Raw(msgspec.msgpack.encode(request))
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(f"the request holds a value that can't be sent to the engine: {error}") from error


def unpacked(request: msgspec.Raw) -> GenerateRequest:
    """The request that was packed."""
    try:
        return REQUESTS.decode(request)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the request is malformed: {error}") from error


def read_frame(end: socket.socket) -> bytes | None:
    """The next message's body, or None if the other side has gone."""
    head = _exactly(end, _LENGTH.size)
    if head is None:
        return None
    size: int = _LENGTH.unpack(head)[0]
    if size > MOST_BYTES:
        raise EngineError(f"a message of {size} bytes is announced, and none may have more than {MOST_BYTES}")
    return _exactly(end, size)


def _exactly(end: socket.socket, size: int) -> bytes | None:
    body = bytearray()
    while len(body) < size:
        try:
            piece = end.recv(min(size - len(body), 1 << 20))
        except OSError:
            return None
        if not piece:
            return None
        body += piece
    return bytes(body)


def named(error: Exception) -> tuple[str, str]:
    """An error as it crosses: its kind and its message."""
    return (type(error).__name__, str(error)) if isinstance(error, AjetError) else ("EngineError", repr(error))


def raised(kind: str, message: str) -> AjetError:
    """The error that was meant, on the other side."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, AjetError):
        return known(message)
    return EngineError(message)
