"""Call trees and episodes as bytes and back: msgpack, token arrays as columns, no pickle.

`decode_…(encode_…(x))` is identical to `x`. Bytes from outside are checked: anything that isn't a valid record raises
EpisodeFormatError. Objects in `metadata` that aren't plain data are stored as their `repr`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import msgspec
import numpy as np

from ajet.schema.chat import Sampling
from ajet.schema.episode import (
    ROOT,
    Call,
    CallTree,
    EnvironmentRecord,
    Episode,
    EpisodeStatus,
    Failure,
    Fork,
    Ledger,
    Outcome,
    Run,
)
from ajet.schema.errors import EpisodeFormatError
from ajet.schema.span import Span

T = TypeVar("T")

FORMAT = 1
"""Version of the byte format. A reader refuses a newer one."""

_COLUMNS = ("logprobs", "mask")
_OWN_FORM = {"sampling": Sampling, "fork": Fork}
_CALL_FIELDS = [field.name for field in fields(Call) if field.name not in (*_COLUMNS, *_OWN_FORM)]
_EPISODE_OWN_FORM = ("status", "tree", "ledger", "outcomes", "failure", "environment", "spans")
_EPISODE_FIELDS = [field.name for field in fields(Episode) if field.name not in _EPISODE_OWN_FORM]
_LATER_FIELDS = ("reward_parts", "reward_weights", "prompt_version", "prompts_used", "began", "spans_left_out")
"""Fields that older records lack."""


def encode_tree(tree: CallTree) -> bytes:
    """A call tree as bytes."""
    return msgspec.msgpack.encode({"format": FORMAT, "tree": _tree_data(tree)}, enc_hook=_plain)


def decode_tree(data: bytes) -> CallTree:
    """The call tree that was passed to `encode_tree`."""
    return _read(data, lambda record: _tree(record["tree"]))


def encode_episode(episode: Episode) -> bytes:
    """An episode as bytes."""
    record = {name: getattr(episode, name) for name in _EPISODE_FIELDS}
    record["status"] = str(episode.status)
    record["outcomes"] = [str(outcome) for outcome in episode.outcomes]
    record["ledger"] = msgspec.to_builtins(episode.ledger)
    record["failure"] = None if episode.failure is None else msgspec.to_builtins(episode.failure)
    record["environment"] = None if episode.environment is None else msgspec.to_builtins(episode.environment)
    record["spans"] = msgspec.to_builtins(episode.spans)
    record["tree"] = _tree_data(episode.tree)
    return msgspec.msgpack.encode({"format": FORMAT, "episode": record}, enc_hook=_plain)


def decode_episode(data: bytes) -> Episode:
    """The episode that was passed to `encode_episode`."""
    return _read(data, lambda record: _episode(record["episode"]))


def _read(data: bytes, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        record = msgspec.msgpack.decode(data)
        if not isinstance(record, dict) or not isinstance(record.get("format"), int):
            raise EpisodeFormatError("these bytes aren't an episode record")
        if record["format"] > FORMAT:
            raise EpisodeFormatError(
                f"the record has format {record['format']}, this version reads up to {FORMAT}: update ajet"
            )
        return build(record)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, IndexError, TypeError, ValueError) as error:
        raise EpisodeFormatError(f"the episode record is damaged: {type(error).__name__}: {error}") from error


def _tree_data(tree: CallTree) -> dict[str, Any]:
    calls = []
    for call in tree.calls:
        record = {name: getattr(call, name) for name in _CALL_FIELDS}
        record["sampling"] = msgspec.to_builtins(call.sampling)
        record["fork"] = None if call.fork is None else msgspec.to_builtins(call.fork)
        record["versions"] = [list(version) for version in call.versions]
        calls.append(record)
    return {
        "lengths": [len(run.ids) for run in tree.runs],
        "parents": [run.parent for run in tree.runs],
        "run_calls": [run.call for run in tree.runs],
        "ids": _join([run.ids for run in tree.runs], np.int32),
        "sampled": [len(call.logprobs) for call in tree.calls],
        "logprobs": _join([call.logprobs for call in tree.calls], np.float32),
        "mask": np.packbits(_concatenate([call.mask for call in tree.calls], np.bool_)).tobytes(),
        "calls": calls,
        "toolsets": tree.toolsets,
    }


def _tree(record: dict[str, Any]) -> CallTree:
    runs: list[Run] = []
    ids = _split(np.frombuffer(record["ids"], "<i4").astype(np.int32), record["lengths"])
    for piece, parent, call in zip(ids, record["parents"], record["run_calls"], strict=True):
        if not ROOT <= parent < len(runs) or not ROOT <= call < len(record["calls"]):
            raise ValueError("a run refers to a run or call that does not exist")
        start = 0 if parent == ROOT else runs[parent].start + len(runs[parent].ids)
        runs.append(Run(piece, parent, start, call))
    sampled = record["sampled"]
    logprobs = _split(np.frombuffer(record["logprobs"], "<f4").astype(np.float32), sampled)
    bits = np.unpackbits(np.frombuffer(record["mask"], np.uint8), count=sum(sampled)).astype(np.bool_)
    calls = []
    for data, call_logprobs, mask in zip(record["calls"], logprobs, _split(bits, sampled), strict=True):
        if not (ROOT <= data["run"] < len(runs) and ROOT <= data["prompt_run"] < len(runs)):
            raise ValueError("a call refers to a run that does not exist")
        data["versions"] = [(int(first), int(version)) for first, version in data["versions"]]
        data["sampling"] = msgspec.convert(data["sampling"], Sampling)
        data["fork"] = msgspec.convert(data["fork"], Fork | None)
        calls.append(Call(logprobs=call_logprobs, mask=mask, **data))
    return CallTree(runs, calls, record["toolsets"])


def _episode(record: dict[str, Any]) -> Episode:
    own = {name: record[name] for name in _EPISODE_FIELDS if name in record or name not in _LATER_FIELDS}
    return Episode(
        status=EpisodeStatus(record["status"]),
        tree=_tree(record["tree"]),
        ledger=msgspec.convert(record["ledger"], Ledger),
        outcomes=tuple(Outcome(outcome) for outcome in record["outcomes"]),
        failure=msgspec.convert(record["failure"], Failure | None),
        environment=msgspec.convert(record.get("environment"), EnvironmentRecord | None),  # absent in older records
        spans=msgspec.convert(record.get("spans", []), list[Span]),
        **own,
    )


def _concatenate(arrays: list[Any], kind: Any) -> Any:
    return np.concatenate(arrays) if arrays else np.zeros(0, kind)


def _join(arrays: list[Any], kind: Any) -> bytes:
    joined: bytes = _concatenate(arrays, kind).astype(np.dtype(kind).newbyteorder("<")).tobytes()
    return joined


def _split(joined: Any, lengths: list[int]) -> list[Any]:
    if sum(lengths) != len(joined) or any(length < 0 for length in lengths):
        raise ValueError(f"{len(joined)} values where {sum(lengths)} were expected")
    pieces = []
    start = 0
    for length in lengths:
        pieces.append(joined[start : start + length])
        start += length
    return pieces


def _plain(value: Any) -> Any:
    """Values msgpack can't encode: numpy and torch values and pydantic models as data, other objects as their repr."""
    for method in ("tolist", "model_dump"):
        if callable(found := getattr(value, method, None)):
            return found()
    return repr(value)
