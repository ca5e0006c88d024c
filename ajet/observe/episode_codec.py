"""An episode as compressed bytes and back (`ajet.schema.codec` gives the form), and what is recorded beside it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import msgspec
import numpy as np

from ajet.schema import codec
from ajet.schema.call_tree import FloatArray
from ajet.schema.episode import Episode

_LEVEL = 1
"""zlib's fastest: on episodes it is within 15 % of the default's size at a fraction of its time."""


@dataclass(slots=True)
class CallCreditRecord:
    """The credit of one call, as recorded."""

    advantage: float = 0.0
    weight: float = 0.0
    entries: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class Annotation:
    """What becomes known of an episode after it ended."""

    credit: list[CallCreditRecord] | None = None
    """One a call of the tree; None: no credit was assigned (a validation, or not trained)."""
    trainer_logprobs: list[FloatArray] | None = None
    """For each call, the trainer's logprob of each sampled token before the update; empty for a call not trained."""


def encode_episode(episode: Episode) -> bytes:
    """The episode, compressed."""
    try:
        data = codec.encode_episode(episode)
    except UnicodeEncodeError:  # half a surrogate pair, as a JSON escape in a tool call may bring
        data = codec.encode_episode(_encodable(episode))
    return zlib.compress(data, _LEVEL)


def decode_episode(data: bytes) -> Episode:
    """The inverse of `encode_episode`."""
    return codec.decode_episode(zlib.decompress(data))


def encode_annotation(annotation: Annotation) -> bytes:
    """The annotation, compressed."""
    return zlib.compress(msgspec.msgpack.encode(annotation, enc_hook=_column), _LEVEL)


def decode_annotation(data: bytes) -> Annotation:
    """The inverse of `encode_annotation`."""
    return msgspec.msgpack.decode(zlib.decompress(data), type=Annotation, dec_hook=_array)


def _column(values: Any) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def _array(_kind: Any, data: Any) -> FloatArray:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _encodable(value: Any) -> Any:
    """`value` with what UTF-8 can't hold written as an escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8") if type(value) is str else value
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encodable(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{entry.name: _encodable(getattr(value, entry.name)) for entry in fields(value)})
    return value
