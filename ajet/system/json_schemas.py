"""Check JSON schemas of unknown origin, and values against them, in processes of their own within limits.

A schema can take for ever: a pattern such as `^(a+)+$`, or references that branch again and again. No Python thread can
be stopped in the middle of that, so it never happens here. (The Rust package jsonschema-rs doesn't replace this: it
matches patterns in linear time, but branching references double its time with each level, and it can't be stopped.)

`check_schema` and `breach` wait for the answer, on any thread but a service loop; a service loop calls them through
`on_loop`. A schema that takes too long raises `SchemaTooSlow`.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ajet.system.processes import ChildProcess

T = TypeVar("T")

PROGRAM = Path(__file__).with_name("json_schema_process.py")
PROCESSES = 2
MAX_SCHEMA_BYTES = 131_072
"""More than ten times the largest that model providers take."""
ANSWER_S = 15.0
"""How long a process may take to answer. It stops by itself after one second of CPU time; this is for when it can't."""
KNOWN = 1024
"""Schemas that were found to be in order are remembered, up to so many."""


class SchemaRefused(ValueError):
    """It isn't a JSON schema, or is too large."""


class SchemaTooSlow(SchemaRefused):
    """A schema that takes longer than the limit."""


class Breach(NamedTuple):
    """How a value violates a schema."""

    path: str
    """`$.a[0]`"""
    message: str


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises SchemaRefused unless this is a JSON schema (draft 2020-12)."""
    text = _text(schema)
    key = blake2b(text, digest_size=16).digest()
    if key in _sound:
        return
    answer = _ask({"schema": text.decode()})
    if answer.get("not_a_schema"):
        raise SchemaRefused(answer["not_a_schema"])
    if len(_sound) >= KNOWN:
        _sound.clear()
    _sound.add(key)


def breach(schema: Mapping[str, Any], value: Any) -> Breach | None:
    """How a JSON value violates a schema, or None. References to other documents aren't followed: SchemaRefused."""
    answer = _ask({"schema": _text(schema).decode(), "value": value})
    if answer.get("not_a_schema"):
        raise SchemaRefused(answer["not_a_schema"])
    found = answer.get("breach")
    return Breach(*found) if found else None


async def on_loop(function: Callable[..., T], *arguments: Any) -> T:
    """Call `check_schema` or `breach` from a service loop, which goes on meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *arguments)


# ------------------------------------------------------------ the processes


_sound: set[bytes] = set()
_free: list[ChildProcess] = []
_slots = threading.BoundedSemaphore(PROCESSES)
_threads = ThreadPoolExecutor(PROCESSES, "json-schemas")


def _forget() -> None:
    """Forget the parent's children and threads in a forked process: they aren't ours."""
    global _threads, _slots
    _free.clear()
    _threads = ThreadPoolExecutor(PROCESSES, "json-schemas")
    _slots = threading.BoundedSemaphore(PROCESSES)


os.register_at_fork(after_in_child=_forget)


def _ask(question: dict[str, Any]) -> dict[str, Any]:
    line = json.dumps(question).encode() + b"\n"
    with _slots:
        try:
            process = _free.pop()
        except IndexError:  # not asked before: another thread may take the last one meanwhile
            process = ChildProcess(PROGRAM)
        try:
            answer = process.ask(line, ANSWER_S)
        except (TimeoutError, ConnectionError):
            process.end()
            raise SchemaTooSlow("applying it takes too long, or too much memory") from None
        except BaseException:
            process.end()
            raise
        _free.append(process)
    read: dict[str, Any] = json.loads(answer)
    if read.get("too_slow"):
        raise SchemaTooSlow(read["too_slow"])
    return read


def _text(schema: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(schema, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaRefused(f"not JSON: {error or 'nested too deeply'}") from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise SchemaRefused(f"it has {len(text)} bytes; at most {MAX_SCHEMA_BYTES} are accepted")
    return text
