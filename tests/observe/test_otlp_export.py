"""`observe.otlp_endpoint`: episodes at a collector, over real HTTP; a collector that is dead or says no."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ajet.config import make_config
from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
from ajet.observe.export import ExportFormat, OtlpExporter, export_episodes
from ajet.observe.otlp import JSON, read_export
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.tracing.adapters import CALL, EPISODE
from ajet.schema.episode import Episode, Failure
from ajet.schema.errors import ConfigError
from ajet.schema.span import Span
from ajet.schema.task import Task
from ajet.task_reader.tracing import exchanges
from support.synthetic_run import Vocabulary, batches


@contextmanager
def collector(status: int = 200, refusals: int = 0) -> Iterator[tuple[str, list[Span], list[str]]]:
    """A stand-in for a collector: keeps what it gets. It refuses the first requests."""
    spans: list[Span] = []
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            keys.append(f"{self.path} {self.headers.get('x-key')}")
            refused = len(keys) <= refusals
            if not refused:
                spans.extend(read_export(body, JSON, 10**6).spans)
            self.send_response(503 if refused else status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", spans, keys
    finally:
        server.shutdown()
        server.server_close()


def some_episodes() -> list[Episode]:
    return [episode for _, group in batches(0, 1, 1, 4, Vocabulary()) for episode in group]


def record(folder: Path, endpoint: str, episodes: list[Episode], keep: Any = "all") -> None:
    keys = {"recorder.keep": keep, "observe.otlp_endpoint": endpoint, "experiment_name": "my-run", "project_name": "p"}
    recorder = EpisodeRecorder(folder / "episodes.sqlite", make_config(keys).ajet)
    for episode in episodes:
        recorder.record(episode, 3, task=Task(main_query="what?"))
    recorder.close()


@pytest.mark.parametrize("keep", ["all", "failures"])
def test_every_episode_is_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b,=,broken")
    episodes = some_episodes()
    emitted = {"rollout_id": "r", "attempt_id": "a", "trace_id": "ab", "parent_id": "gone", "name": "tool"}
    episodes[0].spans = [Span(**emitted, span_id="abcd", start_time=1.0, end_time=2.0)]
    with collector() as (endpoint, spans, keys):
        record(tmp_path, f"{endpoint}/v1/traces", episodes, keep)
    assert set(keys) == {"/v1/traces a b"}
    wholes = {span.trace_id: span for span in spans if span.name == EPISODE}
    assert [span.attributes["ajet.episode_id"] for span in wholes.values()] == [one.episode_id for one in episodes]
    assert all(span.attributes["ajet.step"] == 3 and span.resource["ajet.run"] == "my-run" for span in wholes.values())
    for episode, whole in zip(episodes, wholes.values(), strict=True):
        calls = [span for span in spans if span.trace_id == whole.trace_id and span.name == CALL]
        assert len(calls) == len(episode.tree.calls)
        assert whole.attributes.get("ajet.reward") == episode.reward
    (tool,) = [span for span in spans if span.name == "tool"]
    assert wholes[tool.trace_id].span_id == tool.parent_id, "what has no parent belongs to the episode"
    assert [span.attributes["ajet.episodes"] for span in spans if span.name == "ajet.run"] == [len(episodes)]


def test_half_a_surrogate_pair_costs_no_trace(tmp_path: Path) -> None:
    """A model can write one as an escape in a tool call, and a workflow's error may quote it."""
    episodes = some_episodes()
    episodes[0].failure = Failure("ValueError", "what is \ud800?")
    with collector() as (endpoint, spans, _):
        record(tmp_path, endpoint, episodes)
    assert len([span for span in spans if span.name == EPISODE]) == len(episodes)
    assert any(repr("what is \\ud800?")[1:-1] in str(span) for span in spans)


@pytest.mark.parametrize("status", [None, 500])
def test_a_collector_that_is_gone_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int | None
) -> None:
    with caplog.at_level(logging.WARNING):
        if status is None:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
            record(tmp_path, endpoint, some_episodes())
        else:
            with collector(status) as (endpoint, _, _):
                record(tmp_path, endpoint, some_episodes())
    assert caplog.text.count("spans can't be sent to") == 1
    assert EpisodeStore(tmp_path / "episodes.sqlite").page()[1] == 4, "the run's own record is complete"


def test_a_collector_that_comes_back_is_sent_to_again(caplog: pytest.LogCaptureFixture) -> None:
    span = Span(rollout_id="r", attempt_id="a", span_id="ab", trace_id="ab", name="first", start_time=1.0)
    with collector(refusals=2) as (endpoint, spans, _):
        exporter = OtlpExporter(endpoint, "my-run")
        exporter._sender.add(span)
        assert exporter._sender.flush()
        exporter._sender.add(replace(span, name="later"))
        exporter.close()
    assert [span.name for span in spans] == ["later", "ajet.run"]
    assert caplog.text.count("spans can't be sent to") == 1 and f"{endpoint} lacks 1 spans" in caplog.text


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", "http://h:99999999", "http://h\r\nx"])
def test_what_is_no_address_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"ajet.observe.otlp_endpoint"):
        record(tmp_path, endpoint, [])


def test_exported_traces_are_tasks_again(tmp_path: Path) -> None:
    with collector() as (endpoint, _, _):
        record(tmp_path, endpoint, some_episodes())
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    target = tmp_path / "traces.jsonl"
    assert export_episodes(store, EpisodeFilter(), ExportFormat.OTLP, target) == 4
    assert [span.name for span in read_export(target.read_bytes().splitlines()[0], JSON, 1).spans] == [EPISODE]
    found = list(exchanges(target))
    assert found and all(one.query and one.reply for one in found)
