"""Exports recorded episodes for other programs: JSONL, Parquet, OTLP, or conversations to fine-tune on (`sft`).

`OtlpExporter` sends those of a run to a collector while it goes on. Its `SpanSender` has a thread of its own: adding a
span never waits and never raises. While the endpoint is gone, the spans are lost, and one warning says so.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote, urlsplit

import msgspec

from ajet.observe.episode_codec import conversation, episode_json
from ajet.observe.episode_store import EpisodeFilter, EpisodeStore, RecordedEpisode
from ajet.observe.otlp import PATH, to_json
from ajet.observe.tracing import episode_spans
from ajet.observe.tracing.attributes import SENT_AT
from ajet.observe.tracing.recording import new_span_id, trace_id_of
from ajet.schema.episode import ROOT, Call, Episode
from ajet.schema.errors import ConfigError, MissingDependencyError, UserError
from ajet.schema.files import is_stream, json_line
from ajet.schema.printable import encodable_values
from ajet.schema.span import Span
from ajet.system.http_client import HttpClient, HttpFailure

log = logging.getLogger(__name__)

_ROW_GROUP = 256
KEY = "ajet.observe.otlp_endpoint"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"


class ExportTargetError(UserError):
    """The export's target can't be written."""


class ExportFormat(StrEnum):
    """The format of an export."""

    JSONL = "jsonl"
    """One episode per line, with everything: tree, ids, logprobs, masks, credit."""
    PARQUET = "parquet"
    """One model call per row: ids, logprobs, mask, advantage as typed columns."""
    SFT = "sft"
    """One conversation per line: `messages` and `tools`, as chat fine-tuning tools read them."""
    OTLP = "otlp"
    """One episode per line, as a trace in OpenTelemetry's JSON: model calls, spans, reward."""


def export_episodes(store: EpisodeStore, where: EpisodeFilter, form: ExportFormat, target: Path) -> int:
    """Write the episodes. Returns the number of records written. A file appears whole or not at all; a pipe or a device
    (`/dev/stdout`) is written to as it is. Raises ExportTargetError."""
    recorded = store.all(where)
    if is_stream(target):
        if form is ExportFormat.PARQUET:
            raise ExportTargetError(f"{target} is not a file: Parquet is written to files only")
        with target.open("w", encoding="utf-8") as stream:
            return _write_lines(stream, recorded, form)
    target = target.resolve()  # a link stays one
    if target.is_dir():
        raise ExportTargetError(f"{target} is a folder: name the file to write")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{target.name}.tmp")
    try:
        if form is ExportFormat.PARQUET:
            count = _write_parquet(scratch, recorded)
        else:
            with scratch.open("w", encoding="utf-8") as file:
                count = _write_lines(file, recorded, form)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)  # of an export that failed
    return count


def _write_lines(file: TextIO, recorded: Iterator[RecordedEpisode], form: ExportFormat) -> int:
    count = 0
    for record in _records(recorded, form):
        file.write(json_line(record, ascii_only=form is ExportFormat.JSONL))
        count += 1
    return count


def _records(recorded: Iterator[RecordedEpisode], form: ExportFormat) -> Iterator[dict[str, Any]]:
    if form is ExportFormat.SFT:
        return sft_records(recorded)
    return map(_trace_record if form is ExportFormat.OTLP else _full_record, recorded)


def _trace_record(one: RecordedEpisode) -> dict[str, Any]:
    about = {"ajet.step": one.step, "ajet.validation": one.validation, "ajet.task": one.query}
    return to_json(episode_spans(one.episode, attributes=about), {"service.name": "ajet"})


def sft_records(recorded: Iterator[RecordedEpisode]) -> Iterator[dict[str, Any]]:
    """The conversations of usable episodes, each up to its last reply that is an example: it ended by itself, and no
    other one replaced it. What else assistants say in them is marked as context, as is a reply that was shown before.
    """
    for one in recorded:
        tree = one.episode.tree
        if not one.episode.usable:
            continue
        examples = {index: call for index, call in enumerate(tree.calls) if _is_example(call)}
        extended = {call.extends for call in examples.values()}
        fresh = {id(call.reply) for call in examples.values()}
        for index, call in examples.items():
            if index not in extended:
                said = conversation(tree, index)
                messages = [m if m["role"] != "assistant" or id(m) in fresh else {**m, "train": False} for m in said]
                fresh.difference_update(map(id, said))
                record: dict[str, Any] = {"messages": messages}
                if call.template_kwargs:
                    record["chat_template_kwargs"] = call.template_kwargs
                if call.tools != ROOT:
                    record["tools"] = tree.toolsets[call.tools]
                reward = one.episode.agent_rewards.get(call.agent, one.episode.reward)
                about = {"episode_id": one.episode.episode_id, "agent": call.agent, "reward": reward}
                yield {**record, "task_id": one.episode.task_id, **about}


def _is_example(call: Call) -> bool:
    sampled = call.run != ROOT and call.trainable and call.finish_reason != "length"
    return sampled and call.drop not in ("abandoned", "failure_reward")


def _full_record(one: RecordedEpisode) -> dict[str, Any]:
    return episode_json(one.episode, one.step, one.annotation)


def _call_rows(one: RecordedEpisode) -> Iterator[dict[str, Any]]:
    episode = one.episode
    credit = one.annotation.credit
    for index, call in enumerate(episode.tree.calls):
        sampled = episode.tree.runs[call.run].ids.tolist() if call.run != ROOT else []
        yield {
            "episode_id": episode.episode_id,
            "step": one.step,
            "task_id": episode.task_id,
            "group_id": episode.group_id,
            "status": str(episode.status),
            "reward": episode.reward,
            "call": index,
            "agent": call.agent,
            "turn": call.turn,
            "extends": call.extends,
            "finish_reason": call.finish_reason,
            "prompt_ids": list(episode.tree.prompt_ids(index)),
            "token_ids": sampled,
            "logprobs": list(call.logprobs),
            "mask": list(call.mask),
            "advantage": credit[index].advantage if credit else None,
            "weight": credit[index].weight if credit else None,
            "messages": json.dumps(conversation(episode.tree, index)),
        }


def _write_parquet(target: Path, recorded: Iterator[RecordedEpisode]) -> int:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingDependencyError("--format parquet needs pyarrow: `pip install pyarrow`") from error
    schema = arrow.schema(
        [
            ("episode_id", arrow.string()), ("step", arrow.int64()), ("task_id", arrow.string()),
            ("group_id", arrow.string()), ("status", arrow.string()), ("reward", arrow.float64()),
            ("call", arrow.int32()), ("agent", arrow.string()), ("turn", arrow.int32()), ("extends", arrow.int32()),
            ("finish_reason", arrow.string()), ("prompt_ids", arrow.list_(arrow.int32())),
            ("token_ids", arrow.list_(arrow.int32())), ("logprobs", arrow.list_(arrow.float32())),
            ("mask", arrow.list_(arrow.bool_())), ("advantage", arrow.float64()), ("weight", arrow.float64()),
            ("messages", arrow.string()),
        ]
    )  # fmt: skip
    count = 0
    waiting: list[dict[str, Any]] = []
    with parquet.ParquetWriter(target, schema) as writer:
        for one in recorded:
            waiting.extend(_call_rows(one))
            if len(waiting) >= _ROW_GROUP:
                writer.write_table(arrow.Table.from_pylist(waiting, schema))
                count, waiting = count + len(waiting), []
        writer.write_table(arrow.Table.from_pylist(waiting, schema))
    return count + len(waiting)


# ---------------------------------------------------------------- while a run goes on

MAX_WAITING = 5_000
"""Spans that may wait to be sent; further ones are dropped and counted."""
BATCH = 200
BATCH_S = 0.5
"""How long a batch waits for more spans."""
TIMEOUT_S = 10.0
CLOSE_S = 5.0
"""How long `close` waits for what has not been sent."""
TRIES = 2


class SpanSender:
    """Sends to `base_url` + `/v1/traces`."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        what: str,
        resource: Mapping[str, Any] | None = None,
    ) -> None:
        """`what`: how the warning calls the endpoint."""
        self._client = HttpClient(base_url, headers)
        self._what = what
        self._resource = dict(resource or {})
        self._waiting: queue.Queue[Span | threading.Event] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._warned = False
        self.lost = 0
        """Spans that could not be delivered."""

    def add(self, span: Span) -> None:
        """Queue a span to be sent soon. Returns at once; any thread may call it."""
        if self._waiting.qsize() >= MAX_WAITING:
            self.lost += 1
            return
        self._start()
        self._waiting.put(span)

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all that was added has been sent or given up. Returns False on a timeout."""
        if self._thread is None:
            return True
        reached = threading.Event()
        self._waiting.put(reached)
        return reached.wait(timeout_s)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ajet-spans", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            batch, reached = self._next_batch()
            if batch:
                self._send(batch)
            if reached is not None:
                reached.set()

    def _next_batch(self) -> tuple[list[Span], threading.Event | None]:
        """What is sent together, and the event that says so to a waiting `flush`, if there is one."""
        batch: list[Span] = []
        until = None
        while len(batch) < BATCH:
            try:
                item = self._waiting.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(item, threading.Event):
                return batch, item
            batch.append(item)
            until = until or time.monotonic() + BATCH_S
        return batch, None

    def _send(self, batch: list[Span]) -> None:
        why = ""
        for _ in range(TRIES):
            now = {SENT_AT: time.time()}
            if not (why := self._attempt(_encoded(to_json(batch, {**self._resource, **now})))):
                return
        self.lost += len(batch)
        if not self._warned:
            self._warned = True
            log.warning("spans can't be sent to %s (%s): those of this time are lost", self._what, why)

    def _attempt(self, body: bytes) -> str:
        """Send it once. Returns why it failed; empty if it didn't."""
        try:
            answer = self._client.request("POST", PATH, body, timeout_s=TIMEOUT_S)
        except HttpFailure as failure:
            return str(failure)
        if answer.status < 300:
            return ""
        return f"{answer.status} {answer.body[:200].decode(errors='replace')}"


def _encoded(document: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:  # half a surrogate pair, from a JSON escape in a tool call
        return msgspec.json.encode(encodable_values(document))


class OtlpExporter:
    """Sends episodes that have ended to an OTLP collector, as traces. Any thread may call any method."""

    def __init__(self, endpoint: str, run: str, project: str = "") -> None:
        """`endpoint`: `http://host:4318`, with or without `/v1/traces`."""
        check_endpoint(endpoint)
        self._endpoint = endpoint
        self._run = run
        self._began = time.time()
        self._id = f"{run}/{new_span_id()}"
        resource = {"service.name": "ajet", "ajet.run": run, "ajet.project": project}
        self._sender = SpanSender(
            endpoint.rstrip("/").removesuffix(PATH), _headers(), what=f"{endpoint} ({KEY})", resource=resource
        )
        self._episodes = 0

    def export(self, episode: Episode, step: int, *, validation: bool = False, query: str = "") -> None:
        """Send an episode. Returns at once."""
        self._episodes += 1
        about: dict[str, Any] = {"ajet.step": step, "ajet.validation": validation}
        if query:
            about["ajet.task"] = query[:2000]
        for span in episode_spans(episode, attributes=about):
            self._sender.add(span)

    def close(self) -> None:
        """Send the run's own span, and wait a moment until all has been sent."""
        self._sender.add(
            Span(
                rollout_id="run",
                attempt_id="run",
                trace_id=trace_id_of(self._id),
                span_id=new_span_id(),
                name="ajet.run",
                attributes={"ajet.run": self._run, "ajet.episodes": self._episodes},
                start_time=self._began,
                end_time=time.time(),
            )
        )
        self._sender.flush()
        if self._sender.lost:
            log.warning("%s lacks %d spans of this run", self._endpoint, self._sender.lost)


def check_endpoint(endpoint: str) -> None:
    """Check that an endpoint is an HTTP address. Raises ConfigError."""
    try:
        parts = urlsplit(endpoint)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        right = False
    if not right or not endpoint.isascii() or not endpoint.isprintable():
        raise ConfigError(f"{KEY}: {endpoint!r:.200} is not an address such as http://127.0.0.1:4318")


def _headers() -> dict[str, str]:
    """Read the standard's environment variable: `name=value,name=value`, values percent-encoded."""
    headers = {}
    for part in os.environ.get(HEADERS, "").split(","):
        name, _, value = part.partition("=")
        text = unquote(value.strip())
        if name.strip() and text.isprintable():
            headers[name.strip().lower()] = text
    return headers
