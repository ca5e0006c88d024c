"""What agents were asked in production and what they answered, from the files that tracing leaves: `exchanges(path)`.

AgentScope-Studio's SQLite, OpenTelemetry spans as OTLP JSON (one document, or one per line), and our `episodes.sqlite`.
Files come from outside: nothing in them is executed, and what can't be read is named.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ajet.observe.tracing.adapters import read_call
from ajet.observe.tracing.otlp import attributes_of, objects, raw_spans
from ajet.schema.codec import decode_episode
from ajet.schema.errors import EpisodeFormatError, TaskDataError
from ajet.schema.printable import encodable

log = logging.getLogger("ajet.task_reader")

KEY = "ajet.task_reader.tracing.base_url"
SQLITE = (".sqlite", ".sqlite3", ".db", ".database")
JSON = (".json", ".jsonl", ".ndjson")
CONTENT = "content="
ROLE = re.compile(r", role=(?:'|\")(\w+)(?:'|\")")
"""The end of a printed `Msg(…)`. What is between the two is a Python literal."""


class Exchange(NamedTuple):
    """One question to an agent, and its final answer."""

    query: str
    reply: str
    trace: str
    """Where it was found."""


def exchanges(path: Path, min_reward: float | None = None) -> Iterator[Exchange]:
    """Those of a file, or of all files of a folder."""
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in (*SQLITE, *JSON)]
        if not files:
            raise TaskDataError(f"{KEY}: the folder {path} holds no trace file ({', '.join((*SQLITE, *JSON))})")
        for file in files:
            yield from exchanges(file, min_reward)
        return
    try:
        with path.open("rb") as opened:
            is_sqlite = opened.read(16) == b"SQLite format 3\0"
    except OSError as error:
        raise TaskDataError(f"{KEY}: {path}: {error.strerror or error}") from None
    if is_sqlite:
        yield from _sqlite(path, min_reward)
    elif path.suffix.lower() in SQLITE:
        raise TaskDataError(f"{KEY}: {path} is not an SQLite file, or its beginning is damaged")
    else:
        yield from _otlp(path)


def _sqlite(path: Path, min_reward: float | None) -> Iterator[Exchange]:
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "span_table" in tables:
                yield from _studio(connection, path)
            elif {"episode", "body"} <= tables:
                yield from _episodes(connection, path, min_reward)
            else:
                raise TaskDataError(
                    f"{KEY}: {path}: expected a table `span_table` (AgentScope-Studio) or `episode` (ours); it has: "
                    f"{', '.join(sorted(tables)) or 'none'}"
                )
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise TaskDataError(f"{KEY}: {path}: can't be read: {error}") from None


# ---------------------------------------------------------------- AgentScope-Studio


def _studio(connection: sqlite3.Connection, path: Path) -> Iterator[Exchange]:
    query = "SELECT rowid, attributes FROM span_table WHERE name = 'ReActAgent.reply' OR name LIKE 'invoke_agent%'"
    lost = 0
    for row, text in connection.execute(f"{query} ORDER BY rowid"):
        try:
            attributes = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            lost += 1
            continue
        found = _of_attributes(attributes if isinstance(attributes, dict) else {})
        if found is None or not _whole(found):
            lost += 1
        else:
            yield Exchange(*found, f"{path.name}, span {row}")
    if lost:
        log.warning("%s: %d spans hold no question with an answer, and are left out", path, lost)


def _of_attributes(attributes: dict[str, Any]) -> tuple[str, str] | None:
    """Question and answer of one agent's reply, in any of the forms that were ever written."""
    flat = _flat(attributes)
    asked = _message_text(flat.get("gen_ai.input.messages"), "user")
    said = _message_text(flat.get("gen_ai.output.messages"), "assistant")
    if asked is None:
        asked = _printed(flat.get("input.kwargs.msg"), "user")
    if said is None:
        said = _printed(flat.get("output"), "assistant")
    return (asked, said) if asked and said else None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested attributes under dotted names; lists and texts stay."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and len(prefix) < 200:
            flat |= _flat(value, f"{prefix}{key}.")
        flat[f"{prefix}{key}"] = value
    return flat


def _printed(value: Any, role: str) -> str | None:
    """The text of a printed `Msg(id='…', name='…', content=…, role='…')`."""
    if not isinstance(value, str):
        return _content(value.get("content")) if isinstance(value, dict) else None
    _, _, rest = value.partition(CONTENT)
    *_, found = (None, *ROLE.finditer(rest))
    if found is None or found[1] != role:
        return None
    literal = rest[: found.start()].strip()
    try:
        return _content(ast.literal_eval(literal))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        # printed with real newlines or lone apostrophes: the text between the outer quotes is what was said
        if len(literal) >= 2 and literal[0] == literal[-1] and literal[0] in "'\"":
            return literal[1:-1].strip() or None
        return None


def _content(value: Any) -> str | None:
    """Text, or the last text block of a list of blocks."""
    if isinstance(value, str):
        return value.strip() or None
    for block in reversed(value if isinstance(value, list) else []):
        if isinstance(block, dict):
            text = block.get("text", block.get("content"))
            if isinstance(text, str) and text.strip() and block.get("type", "text") in ("text", "output_text"):
                return text.strip()
    return None


def _message_text(value: Any, role: str) -> str | None:
    """The last message of a role in `gen_ai.…messages`: a list, or JSON of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    for message in reversed(value if isinstance(value, list) else []):
        if isinstance(message, dict) and message.get("role", role) == role:
            text = _content(message.get("parts")) or _content(message.get("content"))
            if text:
                return text
    return None


# ---------------------------------------------------------------- OpenTelemetry


def _otlp(path: Path) -> Iterator[Exchange]:
    traces: dict[str, list[dict[str, Any]]] = {}
    for document in _documents(path):
        for span in raw_spans(document):
            traces.setdefault(str(span.get("traceId", "")), []).append(span)
    if not traces:
        raise TaskDataError(f"{KEY}: {path}: no OpenTelemetry spans (expected `resourceSpans` of OTLP JSON)")
    lost = 0
    for trace, spans in traces.items():
        found = _of_trace(spans)
        if found is None or not _whole(found):
            lost += 1
        else:
            yield Exchange(*found, f"{path.name}, trace {trace}")
    if lost:
        log.warning("%s: %d traces hold no question with an answer, and are left out", path, lost)


def _documents(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskDataError(f"{KEY}: {path}: can't be read: {error}") from None
    try:
        yield json.loads(text)
        return
    except (ValueError, RecursionError):
        pass  # one document per line, then
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TaskDataError(f"{KEY}: {path}:{number}: not JSON: {error}") from None


def _of_trace(spans: list[dict[str, Any]]) -> tuple[str, str] | None:
    """What was asked first and answered last: by the outermost agent if there is one, else by the model calls."""
    spans = sorted(spans, key=lambda span: _number(span.get("startTimeUnixNano")))
    read = [(str(span.get("name", "")), _otlp_attributes(span)) for span in spans]
    for name, attributes in read:
        if name.startswith("invoke_agent") or attributes.get("gen_ai.operation.name") == "invoke_agent":
            found = _of_attributes(attributes)
            if found is not None:
                return found
    asked = _first([_message_text(each.get("gen_ai.input.messages"), "user") for _, each in read])
    said = _first([_message_text(each.get("gen_ai.output.messages"), "assistant") for _, each in reversed(read)])
    if asked is None or said is None:  # written down in another way
        calls = [call for _, each in read if (call := read_call(each)) is not None]
        asked = asked or _first([_message_text(call[0], "user") for call in calls])
        said = said or _first([_message_text([call[1]], "assistant") for call in reversed(calls)])
    return (asked, said) if asked and said else None


def _whole(texts: tuple[str, str]) -> bool:
    """Without halves of surrogate pairs, which a cut leaves and no tokenizer or server takes."""
    return all(encodable(text) == text for text in texts)


def _first(texts: list[str | None]) -> str | None:
    return next((text for text in texts if text), None)


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else 0


def _otlp_attributes(span: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span, and of its events: newer libraries put messages there."""
    values = attributes_of(span)
    for event in objects(span, "events"):
        values |= attributes_of(event)
    return values


# ---------------------------------------------------------------- ours


def _episodes(connection: sqlite3.Connection, path: Path, min_reward: float | None) -> Iterator[Exchange]:
    rows = connection.execute(
        "SELECT episode_id, reward, body.data, query FROM episode JOIN body USING (id) LEFT JOIN task USING (task_id) "
        "ORDER BY episode.id"
    )
    for episode_id, reward, data, query in rows:
        if min_reward is not None and (reward is None or reward < min_reward):
            continue
        try:
            episode = decode_episode(zlib.decompress(data))
        except (zlib.error, EpisodeFormatError) as error:
            raise TaskDataError(f"{KEY}: {path}: episode {episode_id}: {error}") from None
        replies = [call.reply.get("content") for call in episode.tree.calls]
        said = next((text for text in reversed(replies) if isinstance(text, str) and text.strip()), None)
        if query and said:
            yield Exchange(query, said, f"{path.name}, episode {episode_id}")
