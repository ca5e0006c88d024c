"""An episode as bytes and back: MessagePack with arrays as raw columns, then zlib. No pickle.

Token ids, logprobs and masks come back bit for bit. Values of the user's own (metadata, log metrics) that MessagePack
has no form for are kept as their text.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

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
        packed = msgspec.msgpack.encode(episode, enc_hook=_encode_other)
    except UnicodeEncodeError:  # half a surrogate pair, as a JSON escape in a tool call may bring
        plain = msgspec.to_builtins(episode, builtin_types=(bytes,), enc_hook=_encode_other)
        packed = msgspec.msgpack.encode(_encodable(plain))
    return zlib.compress(packed, _LEVEL)


def decode_episode(data: bytes) -> Episode:
    """The inverse of `encode_episode`."""
    return msgspec.msgpack.decode(zlib.decompress(data), type=Episode, dec_hook=_decode_other)


def encode_annotation(annotation: Annotation) -> bytes:
    """The annotation, compressed."""
    return zlib.compress(msgspec.msgpack.encode(annotation, enc_hook=_encode_other), _LEVEL)


def decode_annotation(data: bytes) -> Annotation:
    """The inverse of `encode_annotation`."""
    return msgspec.msgpack.decode(zlib.decompress(data), type=Annotation, dec_hook=_decode_other)


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype in _COLUMNS else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value


_COLUMNS = (np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_))


def _decode_other(kind: Any, value: Any) -> NDArray[Any]:
    dtype = kind.__args__[1].__args__[0]
    return np.array(value, dtype) if isinstance(value, list) else np.frombuffer(value, dtype).copy()
