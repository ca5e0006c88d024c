"""`SpanSender`: sends spans to an OTLP endpoint from a thread of its own; `episode_spans`: an episode as spans.

Adding a span never waits and never raises. While the endpoint is gone, the spans are lost, and one warning says so.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ajet.observe.episode_codec import prompt_messages
from ajet.observe.otlp import PATH, to_json
from ajet.observe.tracing.attributes import CALL, SENT_AT, WORTH, message_attributes
from ajet.observe.tracing.recording import root_span_id_of, trace_id_of
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeStatus
from ajet.schema.printable import encodable_values
from ajet.schema.span import Span, SpanStatus
from ajet.system.http_client import HttpClient, HttpFailure

log = logging.getLogger("ajet.observe.tracing")

MAX_WAITING = 5_000
"""Spans that may wait to be sent; further ones are dropped and counted."""
BATCH = 200
BATCH_S = 0.5
"""How long a batch waits for more spans."""
TIMEOUT_S = 10.0
CLOSE_S = 5.0
"""How long `close` waits for what has not been sent."""
TRIES = 2


EPISODE = "ajet.episode"


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


# ---------------------------------------------------------------- spans of an episode


def episode_spans(episode: Episode, *, tokens: bool = False, attributes: dict[str, Any] | None = None) -> list[Span]:
    """Return all spans of an episode: its root span, then the others by start time.

    `tokens` adds token ids and log-probabilities. `attributes` are added to the root span.
    """
    trace_id, root_id = trace_id_of(episode.episode_id), root_span_id_of(episode.episode_id)
    first_attempt = episode.episode_id.partition(".")[0]
    ids: dict[str, Any] = {"rollout_id": first_attempt, "attempt_id": episode.episode_id, "trace_id": trace_id}
    calls = [
        Span(
            **ids,
            span_id=call_span_id(episode.episode_id, index),
            parent_id=root_id,
            name=CALL,
            status=SpanStatus(status_code="ERROR" if call.run == ROOT else "OK"),
            attributes=_of_call(episode.tree, index, call, tokens),
            start_time=episode.began + call.started_s,
            end_time=episode.began + call.started_s + call.seconds,
        )
        for index, call in enumerate(episode.tree.calls)
    ]
    own = {span.span_id for span in episode.spans}
    emitted = [
        replace(span, trace_id=trace_id, parent_id=span.parent_id if span.parent_id in own else root_id)
        for span in episode.spans
    ]
    parts = sorted([*calls, *emitted], key=lambda span: span.start_time or 0.0)
    whole = Span(
        **ids,
        span_id=root_id,
        name=EPISODE,
        status=_status(episode),
        attributes={**_of_episode(episode), **(attributes or {})},
        start_time=episode.began,
        end_time=max([episode.began + episode.timings.get("total", 0.0), *_ends(parts)]),
    )
    return [whole, *parts]


def call_span_id(episode_id: str, call: int) -> str:
    """The span of one model call."""
    return root_span_id_of(f"{episode_id}/{call}")


def _ends(spans: Sequence[Span]) -> list[float]:
    return [span.end_time for span in spans if span.end_time is not None]


def _status(episode: Episode) -> SpanStatus:
    if episode.failure is not None:
        return SpanStatus(status_code="ERROR", description=episode.failure.in_short[:1000])
    return SpanStatus(status_code="OK" if episode.status is EpisodeStatus.COMPLETED else "UNSET")


def _of_episode(episode: Episode) -> dict[str, Any]:
    values: dict[str, Any] = {
        "ajet.episode_id": episode.episode_id,
        "ajet.task_id": episode.task_id,
        "ajet.group_id": episode.group_id,
        "ajet.status": str(episode.status),
        "ajet.attempts": episode.attempts,
        "ajet.tokens.captured": episode.ledger.captured,
        "ajet.tokens.trained": episode.ledger.trained,
    }
    if episode.tag:
        values["ajet.tag"] = episode.tag
    if episode.is_success is not None:
        values["ajet.is_success"] = episode.is_success
    if episode.reward is not None:
        values[WORTH] = episode.reward
    return values | {f"{WORTH}.{name}": value for name, value in episode.reward_parts.items()}


def _of_call(tree: CallTree, index: int, call: Call, tokens: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "agent.name": call.agent,
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": call.name,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": len(call.logprobs),
        "gen_ai.response.finish_reasons": [call.finish_reason],
    }
    for number, message in enumerate(prompt_messages(tree, index)):
        values |= message_attributes(f"gen_ai.prompt.{number}", message)
    if call.reply:
        values |= message_attributes("gen_ai.completion.0", call.reply)
    if call.tools != ROOT:
        values["gen_ai.request.tools"] = json.dumps(tree.toolsets[call.tools], ensure_ascii=False)
    if call.reward is not None:
        values[WORTH] = call.reward
    if tokens and call.run != ROOT:
        values["prompt_token_ids"] = tree.prompt_ids(index).tolist()
        values["response_token_ids"] = tree.runs[call.run].ids.tolist()
        values["logprobs"] = call.logprobs.tolist()
    return values
