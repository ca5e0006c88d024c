"""An episode, and what is recorded with it, as compressed bytes and as JSON.

The bytes are `ajet.schema.codec`'s, compressed, and can be decoded. The JSON is for other programs.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ajet.schema import codec
from ajet.schema.call_tree import FloatArray
from ajet.schema.episode import Episode
from ajet.schema.printable import encodable

_LEVEL = 1
"""zlib's fastest: within 15 % of the default's size on episodes, at a fraction of its time."""


@dataclass(slots=True)
class CallCreditRecord:
    """The credit of one call, as recorded."""

    advantage: float = 0.0
    weight: float = 0.0
    entries: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class Annotation:
    """What becomes known about an episode after it ended."""

    credit: list[CallCreditRecord] | None = None
    """One per call of the tree. None: no credit was assigned (a validation episode, or not trained)."""
    trainer_logprobs: list[FloatArray] | None = None
    """Per call, the trainer's logprob of each sampled token before the update; empty for calls that aren't trained."""


def encode_episode(episode: Episode) -> bytes:
    """The episode, compressed."""
    try:
        data = codec.encode_episode(episode)
    except UnicodeEncodeError:  # half a surrogate pair, from a JSON escape in a tool call
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


def episode_json(episode: Episode, step: int, annotation: Annotation | None = None) -> dict[str, Any]:
    """Everything known about an episode, as JSON values. Token arrays are lists."""
    record: dict[str, Any] = {"step": step, **_builtin(episode)}
    if annotation is not None:
        record |= _builtin(annotation)
    return record


def write_trajectory(folder: Path, episode: Episode, step: int, annotation: Annotation | None) -> Path:
    """Write `step_N/<episode id>.json`, completely or not at all."""
    target = folder / f"step_{step}" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', episode.episode_id)[:150]}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".tmp")
    scratch.write_text(json.dumps(episode_json(episode, step, annotation), ensure_ascii=True), encoding="utf-8")
    scratch.replace(target)
    return target


def _column(values: Any) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def _array(_kind: Any, data: Any) -> FloatArray:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _encodable(value: Any) -> Any:
    """`value`, with escapes for what UTF-8 can't hold."""
    if isinstance(value, str):
        return encodable(value) if type(value) is str else value
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encodable(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{entry.name: _encodable(getattr(value, entry.name)) for entry in fields(value)})
    return value


def _builtin(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=_encode_other)


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)
