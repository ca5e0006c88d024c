"""`SpanSender`: sends spans to an OTLP endpoint from a thread of its own, in batches.

Whoever gives it spans never waits and never sees an error. An endpoint that is gone costs the spans and one warning.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ajet.observe.tracing.attributes import SENT_AT
from ajet.observe.tracing.otlp import to_json
from ajet.schema.span import Span
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
MAX_FAILURES = 3
"""Batches in a row that could not be delivered before the endpoint is given up."""


class SpanSender:
    """Sends to `base_url` + `/v1/traces`."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        what: str,
        resource: Mapping[str, Any] | None = None,
        path: str = "/v1/traces",
    ) -> None:
        """`what`: how the warning calls the endpoint."""
        self._client = HttpClient(base_url, headers)
        self._path = path
        self._what = what
        self._resource = dict(resource or {})
        self._waiting: queue.Queue[Span | threading.Event] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._gone = False
        self._warned = False
        self._failures = 0
        self.lost = 0
        """Spans that could not be delivered."""

    def add(self, span: Span) -> None:
        """Send this soon. Returns at once, from any thread."""
        if self._gone or self._waiting.qsize() >= MAX_WAITING:
            self.lost += 1
            return
        self._start()
        self._waiting.put(span)

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all that was added has been sent or given up. False: it took too long."""
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
        """What is sent together, and whoever waits for it."""
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
        if not self._gone:
            for _ in range(TRIES):
                now = {SENT_AT: time.time()}
                if not (why := self._attempt(msgspec.json.encode(to_json(batch, {**self._resource, **now})))):
                    self._failures = 0
                    return
        self.lost += len(batch)
        self._failures += 1
        self._gone = self._failures >= MAX_FAILURES
        if not self._warned:
            self._warned = True
            log.warning("spans can't be sent to %s (%s): those of this time are lost", self._what, why)

    def _attempt(self, body: bytes) -> str:
        """Why it failed; empty if it didn't."""
        try:
            answer = self._client.request("POST", self._path, body, timeout_s=TIMEOUT_S)
        except HttpFailure as failure:
            return str(failure)
        if answer.status < 300:
            return ""
        return f"{answer.status} {answer.body[:200].decode(errors='replace')}"
