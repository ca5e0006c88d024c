"""An episode, and what is recorded with it, as bytes, as JSON, and as text to search and preview.

The bytes are msgpack with token arrays as columns, compressed; no pickle. `decode_…(encode_…(x))` is identical to `x`,
and bytes from outside are checked: anything that isn't a valid record raises EpisodeFormatError. Objects in `metadata`
that aren't plain data are stored as their `repr`. The JSON is for other programs, and isn't read back.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

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
    FloatArray,
    Fork,
    Ledger,
    Outcome,
    Run,
)
from ajet.schema.errors import EpisodeFormatError
from ajet.schema.files import json_line, write_whole
from ajet.schema.printable import encodable
from ajet.schema.span import Span

FORMAT = 1
"""Version of the byte format. A reader refuses a newer one."""

_LEVEL = 1
"""zlib's fastest: within 15 % of the default's size on episodes, at a fraction of its time."""
_ANY_SIZE, _MOST_GAIN = 64 << 20, 32
"""Records are decompressed up to this size, and up to so many times their own: those of episodes gain less."""
_DAMAGED = (zlib.error, msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError)

_COLUMNS = ("logprobs", "mask")
_NOT_STORED = ("experts",)
"""What is needed until the call is trained, and takes too much room."""
_CALL_FIELDS = [field.name for field in fields(Call) if field.name not in (*_COLUMNS, *_NOT_STORED)]
_EPISODE_FIELDS = [field.name for field in fields(Episode)]


def encode_episode(episode: Episode) -> bytes:
    """The episode as bytes."""
    return stored_form(episode)[1]


def stored_form(episode: Episode) -> tuple[Episode, bytes]:
    """The episode with the texts that a reader will see, and as bytes."""
    try:
        data = _packed(episode)
    except (UnicodeEncodeError, OverflowError):  # half a surrogate pair, from a JSON escape; a number above 64 bits
        episode = _encodable(episode)
        data = _packed(episode)
    return episode, zlib.compress(data, _LEVEL)


def inflated(data: bytes) -> bytes:
    """Decompress bytes from outside: a megabyte of them may hold a gigabyte. Raises a ValueError."""
    stream = zlib.decompressobj()
    whole = stream.decompress(data, max(_ANY_SIZE, _MOST_GAIN * len(data)))
    if not stream.eof:
        raise ValueError("it is cut short, or too large for its compressed size")
    return whole


def decode_episode(data: bytes) -> Episode:
    """The inverse of `encode_episode`. Raises EpisodeFormatError."""
    try:
        record = msgspec.msgpack.decode(inflated(data))
        if not isinstance(record, dict) or not isinstance(record.get("format"), int):
            raise EpisodeFormatError("these bytes aren't an episode record")
        if record["format"] > FORMAT:
            raise EpisodeFormatError(
                f"the record has format {record['format']}, this version reads up to {FORMAT}: update ajet"
            )
        return _episode(record["episode"])
    except _DAMAGED as error:
        raise EpisodeFormatError(f"the episode record is damaged: {type(error).__name__}: {error}") from error


def _packed(episode: Episode) -> bytes:
    record = {name: getattr(episode, name) for name in _EPISODE_FIELDS}
    record["tree"] = _tree_data(episode.tree)
    return msgspec.msgpack.encode({"format": FORMAT, "episode": record}, enc_hook=_plain)


def _tree_data(tree: CallTree) -> dict[str, Any]:
    return {
        "lengths": [len(run.ids) for run in tree.runs],
        "parents": [run.parent for run in tree.runs],
        "run_calls": [run.call for run in tree.runs],
        "ids": _join([run.ids for run in tree.runs], np.int32),
        "sampled": [len(call.logprobs) for call in tree.calls],
        "logprobs": _join([call.logprobs for call in tree.calls], np.float32),
        "mask": np.packbits(_concatenate([call.mask for call in tree.calls], np.bool_)).tobytes(),
        "calls": [{name: getattr(call, name) for name in _CALL_FIELDS} for call in tree.calls],
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
    calls: list[Call] = []
    for data, call_logprobs, mask in zip(record["calls"], logprobs, _split(bits, sampled), strict=True):
        if not (ROOT <= data["run"] < len(runs) and ROOT <= data["prompt_run"] < len(runs)):
            raise ValueError("a call refers to a run that does not exist")
        if not (ROOT <= data["extends"] < len(calls) and ROOT <= data["tools"] < len(record["toolsets"])):
            raise ValueError("a call refers to a call or tools that do not exist")
        data["versions"] = [(int(first), int(version)) for first, version in data["versions"]]
        data["sampling"] = msgspec.convert(data["sampling"], Sampling)
        data["fork"] = msgspec.convert(data["fork"], Fork | None)
        calls.append(Call(logprobs=call_logprobs, mask=mask, **data))
    return CallTree(runs, calls, record["toolsets"])


def _episode(record: dict[str, Any]) -> Episode:
    own: dict[str, Any] = {
        "status": EpisodeStatus(record["status"]),
        "tree": _tree(record["tree"]),
        "ledger": msgspec.convert(record["ledger"], Ledger),
        "outcomes": tuple(Outcome(outcome) for outcome in record["outcomes"]),
        "failure": msgspec.convert(record["failure"], Failure | None),
        "environment": msgspec.convert(record["environment"], EnvironmentRecord | None),
        "spans": msgspec.convert(record["spans"], list[Span]),
    }
    return Episode(**{name: record[name] for name in _EPISODE_FIELDS} | own)


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
    """Values msgspec can't encode: numpy and torch values and pydantic models as data, other objects as their repr."""
    for method in ("tolist", "model_dump"):  # what a model holds may again be such values
        if callable(found := getattr(value, method, None)):
            return found()
    return repr(value)


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


def encode_annotation(annotation: Annotation) -> bytes:
    """The annotation as bytes."""
    return zlib.compress(msgspec.msgpack.encode(annotation, enc_hook=_column), _LEVEL)


def decode_annotation(data: bytes) -> Annotation:
    """The inverse of `encode_annotation`. Raises EpisodeFormatError."""
    try:
        return msgspec.msgpack.decode(inflated(data), type=Annotation, dec_hook=_array)
    except _DAMAGED as error:
        raise EpisodeFormatError(f"the episode's annotation is damaged: {type(error).__name__}: {error}") from error


def episode_json(episode: Episode, step: int, annotation: Annotation | None = None) -> dict[str, Any]:
    """Everything known about an episode, as JSON values. Token arrays are lists."""
    record: dict[str, Any] = {"step": step, **_builtin(episode)}
    if annotation is not None:
        record |= _builtin(annotation)
    return record


def write_trajectory(folder: Path, episode: Episode, step: int, annotation: Annotation | None) -> Path:
    """Write `step_N/<episode id>.json`, completely or not at all."""
    target = folder / f"step_{step}" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', episode.episode_id)[:150]}.json"
    write_whole(target, json_line(episode_json(episode, step, annotation), ascii_only=True))
    return target


def _column(values: Any) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def _array(_kind: Any, data: Any) -> FloatArray:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _encodable(value: Any) -> Any:
    """`value`, with escapes for what UTF-8 can't hold, and whole numbers that MessagePack can't hold as text."""
    if isinstance(value, str):
        return encodable(value) if type(value) is str else value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encodable(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{entry.name: _encodable(getattr(value, entry.name)) for entry in fields(value)})
    return value


def _builtin(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=_plain)


# ---------------------------------------------------------------- messages and text


_SEARCHED_CHARACTERS = 200_000
"""The text filter searches an episode up to here."""
_PREVIEW_CHARACTERS = 160
TokenBytes = Callable[[Iterable[int]], dict[int, bytes]]


def conversation(tree: CallTree, call: int) -> list[dict[str, Any]]:
    """The messages of a call's prompt, then its reply."""
    reply = tree.calls[call].reply
    return [*prompt_messages(tree, call), *([reply] if reply else [])]


def prompt_messages(tree: CallTree, call: int) -> list[dict[str, Any]]:
    """The messages of a call's prompt: the conversation that it extends, then what is new."""
    chain = [call]
    while (before := tree.calls[chain[-1]].extends) != ROOT:
        chain.append(before)
    messages: list[dict[str, Any]] = []
    for index in reversed(chain):
        messages.extend(tree.calls[index].new_messages)
        if index != call and tree.calls[index].reply:
            messages.append(tree.calls[index].reply)
    return messages


def last_calls(tree: CallTree) -> list[int]:
    """The calls that no other call extends: one per conversation."""
    extended = {call.extends for call in tree.calls}
    return [index for index in range(len(tree.calls)) if index not in extended]


def message_text(message: dict[str, Any]) -> str:
    """The text of a message: content, reasoning and tool calls."""
    return "\n".join(_parts(message))


def _parts(message: dict[str, Any]) -> Iterator[str]:
    for key in ("reasoning_content", "content"):
        content = message.get(key)
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (
                part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {} if isinstance(call, dict) else {}
        arguments = function.get("arguments", "")
        yield f"{function.get('name', '')} {arguments if isinstance(arguments, str) else json.dumps(arguments)}"


def searchable_text(episode: Episode) -> str:
    """All messages of an episode, each once, and its failure."""
    pieces: list[str] = []
    for call in episode.tree.calls:
        pieces.extend(message_text(message) for message in call.new_messages)
        pieces.append(message_text(call.reply))
    if episode.failure is not None:
        pieces.append(f"{episode.failure.kind} {episode.failure.message}")
    return words("\n".join(pieces)[:_SEARCHED_CHARACTERS])


def words(text: str) -> str:
    """Text for the index: scripts written without spaces get one between characters, so parts can be found."""
    text = encodable(text)
    if text.isascii():
        return text
    return "".join(f" {character} " if character >= "\u2e80" else character for character in text)


def preview(episode: Episode) -> str:
    """The first words of the user's first message."""
    return one_line(_first_question(episode))


def query_of(episode: Episode, query: str | None, preview: str) -> str:
    """What an episode was asked: its task's `query`, unless its own `preview` says otherwise. A service may ask
    something else in each episode of a task."""
    return query if query and one_line(query) == preview else _first_question(episode) if query else ""


def _first_question(episode: Episode) -> str:
    for call in episode.tree.calls:
        for message in call.new_messages:
            if message.get("role") == "user":
                return message_text(message)
    return ""


def one_line(text: str) -> str:
    """The first words of a text, without line breaks."""
    return encodable(" ".join(text[: 8 * _PREVIEW_CHARACTERS].split())[:_PREVIEW_CHARACTERS])


# ---------------------------------------------------------------- tokens


def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """A function from ids to the bytes of each, for any Hugging Face tokenizer. Readers of episodes then need none.

    Byte-level vocabularies give exact bytes (a token may be part of a character), SentencePiece ones their pieces.
    """
    byte_level = "Ġ" in tokenizer.get_vocab() or "Ċ" in tokenizer.get_vocab()
    alphabet = {character: byte for byte, character in _byte_alphabet().items()}
    added = {int(index): str(token) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}

    def piece(index: int) -> bytes:
        if index in added:
            return added[index].encode()
        token = tokenizer.convert_ids_to_tokens(index)
        if token is None:
            return f"<{index}>".encode()
        if byte_level and all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("▁", " ").encode()

    def pieces(ids: Iterable[int]) -> dict[int, bytes]:
        return {index: piece(index) for index in ids}

    return pieces


def _byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
