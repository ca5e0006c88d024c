"""`OtlpExporter`: sends episodes to a collector of OpenTelemetry, one trace each. Never blocks a run, nor ends it."""

from __future__ import annotations

import os
import time
from typing import Any
from urllib.parse import unquote, urlsplit

from ajet.observe.tracing.episode_trace import episode_spans
from ajet.observe.tracing.recording import new_span_id, trace_id_of
from ajet.observe.tracing.sender import SpanSender
from ajet.schema.episode import Episode
from ajet.schema.errors import ConfigError
from ajet.schema.span import Span

KEY = "ajet.observe.otlp_endpoint"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
PATH = "/v1/traces"


class OtlpExporter:
    """Takes episodes that have ended. Any thread may call any method."""

    def __init__(self, endpoint: str, run: str, project: str = "") -> None:
        """`endpoint`: `http://host:4318`, with or without `/v1/traces`."""
        check_endpoint(endpoint)
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
        """Send the run itself, and wait a moment for what is on its way."""
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


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError."""
    try:
        parts = urlsplit(endpoint)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        right = False
    if not right or not endpoint.isascii() or not endpoint.isprintable():
        raise ConfigError(f"{KEY}: {endpoint!r:.200} is not an address such as http://127.0.0.1:4318")


def _headers() -> dict[str, str]:
    """What the standard's environment variable says: `name=value,name=value`, values percent-encoded."""
    headers = {}
    for part in os.environ.get(HEADERS, "").split(","):
        name, _, value = part.partition("=")
        text = unquote(value.strip())
        if name.strip() and text.isprintable():
            headers[name.strip().lower()] = text
    return headers
