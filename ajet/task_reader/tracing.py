"""`tracing`: tasks made from production requests to agents, which are read from trace files.

AgentScope-Studio's SQLite, OpenTelemetry spans as OTLP JSON (one document, or one per line), and our `episodes.sqlite`.
Trace files are untrusted: nothing in them is executed, and errors name what can't be read. A task's side of the split
depends on its text alone, so it never changes when traces are added.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import logging
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ajet.config.tasks import TraceFilterConfig
from ajet.observe.episode_codec import decode_episode, query_of
from ajet.observe.otlp import attributes_of, objects, raw_spans
from ajet.observe.tracing import read_call
from ajet.schema.errors import EpisodeFormatError, TaskDataError
from ajet.schema.files import write_whole
from ajet.schema.printable import encodable
from ajet.schema.task import Task
from ajet.task_judge.helper import Asker, HelperModel
from ajet.task_judge.helper_answers import NearDuplicates
from ajet.task_judge.math_answer_as_judge import last_boxed
from ajet.task_reader.quality import review
from ajet.task_reader.task_reader_base import BaseTaskReader, found_place

log = logging.getLogger("ajet.task_reader")

KEY = "ajet.task_reader.tracing.base_url"
SQLITE = (".sqlite", ".sqlite3", ".db", ".database")
JSON = (".json", ".jsonl", ".ndjson")
CONTENT = "content="
ROLE = re.compile(r", role=(?:'|\")(\w+)(?:'|\")")
"""The end of a printed `Msg(…)`. Between start and end is a Python literal."""


class Exchange(NamedTuple):
    """One question to an agent, and its final answer."""

    query: str
    reply: str
    trace: str
    """The trace it was found in."""


def exchanges(path: Path, min_reward: float | None = None) -> Iterator[Exchange]:
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
    rows = connection.execute(f"{query} ORDER BY rowid")
    yield from _found(path, "span", ((row, _of_attributes(_parsed(text))) for row, text in rows))


def _found(path: Path, what: str, read: Iterable[tuple[object, tuple[str, str] | None]]) -> Iterator[Exchange]:
    """The exchanges of a file's spans or traces, given by name; those without one are counted in the log. So are those
    with lone surrogates, which truncation leaves and no tokenizer or server accepts."""
    lost = 0
    for name, texts in read:
        if texts is not None and all(encodable(text) == text for text in texts):
            yield Exchange(*texts, f"{path.name}, {what} {name}")
        else:
            lost += 1
    if lost:
        log.warning("%s: %d %ss hold no question with an answer, and are left out", path, lost, what)


def _parsed(text: Any) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _of_attributes(attributes: Any) -> tuple[str, str] | None:
    """The question and answer in an agent span's attributes, in any of the formats that AgentScope has used."""
    flat = _flat(attributes if isinstance(attributes, dict) else {})
    asked = _message_text(flat.get("gen_ai.input.messages"), "user")
    said = _message_text(flat.get("gen_ai.output.messages"), "assistant")
    if asked is None:
        asked = _printed(flat.get("input.kwargs.msg"), "user")
    if said is None:
        said = _printed(flat.get("output"), "assistant")
    return (asked, said) if asked and said else None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested attributes to dotted names. Lists and texts stay as they are."""
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
        # printed with real newlines or unescaped apostrophes: take the text between the outer quotes
        if len(literal) >= 2 and literal[0] == literal[-1] and literal[0] in "'\"":
            return literal[1:-1].strip() or None
        return None


def _content(value: Any) -> str | None:
    """The text of a message's content: the content itself, or the last text block of a list."""
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
        value = _parsed(value)
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
    yield from _found(path, "trace", ((trace, _of_trace(spans)) for trace, spans in traces.items()))


def _documents(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskDataError(f"{KEY}: {path}: can't be read: {error}") from None
    if (whole := _parsed(text)) is not None:
        yield whole
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TaskDataError(f"{KEY}: {path}:{number}: not JSON: {error}") from None


def _of_trace(spans: list[dict[str, Any]]) -> tuple[str, str] | None:
    """The first question and the last answer of a trace, from the outermost agent if there is one, else from the model
    calls."""
    spans = sorted(spans, key=lambda span: _number(span.get("startTimeUnixNano")))
    read = [(str(span.get("name", "")), _otlp_attributes(span)) for span in spans]
    for name, attributes in read:
        if name.startswith("invoke_agent") or attributes.get("gen_ai.operation.name") == "invoke_agent":
            found = _of_attributes(attributes)
            if found is not None:
                return found
    asked = _first([_message_text(each.get("gen_ai.input.messages"), "user") for _, each in read])
    said = _first([_message_text(each.get("gen_ai.output.messages"), "assistant") for _, each in reversed(read)])
    if asked is None or said is None:  # recorded in another format
        calls = [call for _, each in read if (call := read_call(each)) is not None]
        asked = asked or _first([_message_text(call[0], "user") for call in calls])
        said = said or _first([_message_text([call[1]], "assistant") for call in reversed(calls)])
    return (asked, said) if asked and said else None


def _first(texts: list[str | None]) -> str | None:
    return next((text for text in texts if text), None)


def _number(value: Any) -> int:
    decimal = isinstance(value, str) and value.isdecimal() and len(value) < 40
    return int(value) if isinstance(value, int) or decimal else 0


def _otlp_attributes(span: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span and of its events, where newer libraries put messages."""
    values = attributes_of(span)
    for event in objects(span, "events"):
        values |= attributes_of(event)
    return values


# ---------------------------------------------------------------- ours


def _episodes(connection: sqlite3.Connection, path: Path, min_reward: float | None) -> Iterator[Exchange]:
    rows = connection.execute(
        "SELECT episode_id, reward, body.data, query, preview FROM episode JOIN body USING (id) "
        "LEFT JOIN task USING (task_id) ORDER BY episode.id"
    )
    for episode_id, reward, data, query, preview in rows:
        if min_reward is not None and (reward is None or reward < min_reward):
            continue
        try:
            episode = decode_episode(data)
        except EpisodeFormatError as error:
            raise TaskDataError(f"{KEY}: {path}: episode {episode_id}: {error}") from None
        replies = [call.reply.get("content") for call in episode.tree.calls if call.drop != "abandoned"]
        said = next((text for text in reversed(replies) if isinstance(text, str) and text.strip()), None)
        if (asked := query_of(episode, query, preview)) and said:
            yield Exchange(asked, said, f"{path.name}, episode {episode_id}")


MARKED = re.compile(r"####\s*(\S[^\n]*)")


class TracingReader(BaseTaskReader):
    """`ajet.task_reader.tracing`."""

    def get_training_tasks(self) -> list[Task]:
        validation = {task.task_id for task in self.get_validation_tasks()}
        tasks = [task for task in self.accepted if task.task_id not in validation]
        if not tasks:
            raise TaskDataError(
                f"{KEY}: all {len(self.accepted)} tasks are on the validation side: lower "
                "ajet.task_reader.tracing.validation_share"
            )
        return tasks

    def get_validation_tasks(self) -> list[Task]:
        tasks, most = self.accepted, self.reader_config.tracing.validation_share
        validation = [task for task in tasks if _place(task) < most]
        if len(validation) == len(tasks) and most < 1:  # of few traces: there must be something to train on
            validation.remove(max(tasks, key=_place))
        return validation

    @cached_property
    def accepted(self) -> list[Task]:
        """All tasks that passed the filters, in the order of the traces."""
        section = self.reader_config.tracing
        if not section.base_url:
            raise TaskDataError(f"{KEY} is missing: name a trace file or a folder of them")
        output = Path(section.train_output_path).expanduser() if section.train_output_path else None
        known = [] if output is None else _known(output)
        seen = {task.metadata["qa_hash"] for task in known}
        queries = {task.main_query for task in known}
        fresh: list[Task] = []
        repeated = 0
        for place in section.base_url:
            for exchange in exchanges(found_place(place, self.config.base_dirs, KEY), section.min_reward):
                task = _task(exchange)
                if task.metadata["qa_hash"] in seen or task.main_query in queries:
                    repeated += 1
                    continue
                seen.add(task.metadata["qa_hash"])
                queries.add(task.main_query)
                fresh.append(task)
        found = len(fresh)
        for filter_ in section.filters:
            if filter_.enabled:
                fresh = self._filtered(fresh, known, filter_)
        tasks = [*known, *fresh]
        log.info(
            "traces: %d new tasks, %d kept by the filters, %d known before, %d repetitions",
            *(found, len(fresh), len(known), repeated),
        )
        if not tasks:
            raise TaskDataError(f"{KEY}: no task is left: {found} found in the traces, none kept by the filters")
        if output is not None and fresh:
            _write(output, tasks)
        return tasks

    def _filtered(self, tasks: list[Task], known: Sequence[Task], filter_: TraceFilterConfig) -> list[Task]:
        params = filter_.params
        if filter_.type == "deduplication":
            return self._without_duplicates(tasks, known, params.similarity_threshold)
        section = self.reader_config.tracing
        helper = HelperModel.chosen(self.config, section.alien_llm_model, "ajet.task_reader.tracing.alien_llm_model")
        asker = Asker.of_run(self.config, helper, max_concurrent=section.max_thread)
        reviewing = review(
            tasks,
            asker,
            rules=params.custom_rubrics,
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            tell=params.print_reason,
        )
        return asyncio.run_coroutine_threadsafe(reviewing, helper.loop()).result()

    def _without_duplicates(self, tasks: list[Task], known: Sequence[Task], threshold: float) -> list[Task]:
        helper = HelperModel.for_embeddings(self.config)
        embed = None if helper is None else Asker.of_run(self.config, helper).vectors
        texts = NearDuplicates(threshold, embed)
        if helper is not None:
            learning = texts.learn(task.main_query for task in (*known, *tasks))
            asyncio.run_coroutine_threadsafe(learning, helper.loop()).result()
        for task in known:
            texts.add(task.main_query)
        return [task for task in tasks if texts.add(task.main_query) is None]


def _task(exchange: Exchange) -> Task:
    """Make a task. Its `answer` is the reference: the marked result if the reply marks one."""
    query, reply = exchange.query, exchange.reply
    boxed, marked = last_boxed(reply), MARKED.findall(reply)
    answer = boxed or (marked[-1].strip() if marked else reply)
    found = _hash(f"{query}\n{reply}")
    metadata = {"answer": answer, "reply": reply, "qa_hash": found, "trace": exchange.trace}
    return Task(main_query=query, task_id=f"trace-{_hash(query)[:12]}", env_type="no_env", metadata=metadata)


def _place(task: Task) -> float:
    """Where the task's text puts it between validation (0) and training (1)."""
    return int(_hash(task.main_query)[:12], 16) / 16**12


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _known(path: Path) -> list[Task]:
    """The tasks that earlier runs accepted."""
    if not path.exists():
        return []
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                task = Task.model_validate(json.loads(line))
                task.metadata["qa_hash"]
            except (ValueError, KeyError) as error:
                raise TaskDataError(f"{path}:{number}: not a task that this reader wrote: {error}") from None
            tasks.append(task)
    return tasks


def _write(path: Path, tasks: Sequence[Task]) -> None:
    write_whole(path, "".join(f"{json.dumps(task.model_dump(mode='json'))}\n" for task in tasks))
