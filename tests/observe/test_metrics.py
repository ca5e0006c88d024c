"""Aggregated log metrics, secrets, and trackers that must never disturb a run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet.config import Config, make_config
from ajet.observe.logs import Masker
from ajet.observe.metrics import (
    BackgroundSink,
    aggregate_log_metrics,
    make_sinks,
    make_tracker,
    missing_trackers,
)
from ajet.schema.printable import is_secret, is_secret_key
from support.waiting import wait_until


def test_log_metrics_nested_and_in_lists_are_aggregated() -> None:
    logged = [
        {"score": 1, "tool": {"calls": 3, "ok": True}, "lengths": [1, 5], "note": "text", "none": None},
        {"score": 0.5, "tool": {"calls": 1, "ok": False}, "lengths": np.array([3.0]), "bad": float("nan")},
    ]
    assert aggregate_log_metrics(logged) == {
        "user/score": 0.75,
        "user/tool/calls": 2.0,
        "user/tool/ok": 0.5,
        "user/lengths": 3.0,
        "user/lengths/min": 1.0,
        "user/lengths/max": 5.0,
    }


@pytest.mark.parametrize("key", ["api_key", "API-KEY", "openaiApiKey", "wandb_token", "password", "client_secret"])
def test_secret_keys(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key", ["max_tokens", "stop_token_ids", "key_ttl", "token_mean", "shared_token_loss", "author"]
)
def test_ordinary_keys_are_not_masked(key: str) -> None:
    assert not is_secret_key(key)


@pytest.mark.parametrize("key", ["OPENAI_KEY", "my_pwd", "sas", "SENTRY_DSN", "sessionId", "key"])
def test_values_that_look_secret_are_masked_under_doubtful_keys(key: str) -> None:
    assert is_secret(key, "x9f3k2m1q8")


@pytest.mark.parametrize(("key", "value"), [("prompt_key", "question"), ("reward_fn_key", "data_source"), ("pin", "4")])
def test_keys_that_name_a_column_are_kept(key: str, value: str) -> None:
    assert not is_secret(key, value)


def test_masker_keeps_references_and_masks_known_shapes() -> None:
    masked = Masker().value({"api_key": "${oc.env:OPENAI_API_KEY}", "text": "Bearer abcdefghijklmnop1234", "n": 3})
    assert masked == {"api_key": "${oc.env:OPENAI_API_KEY}", "text": "Bearer ********", "n": 3}


class Recording:
    """A sink that fails a number of times, then keeps what it gets."""

    def __init__(self, failures: int = 0, gate: threading.Event | None = None) -> None:
        self.failures = failures
        self.gate = gate
        self.steps: list[int] = []
        self.closed = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no network")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_a_failing_tracker_is_retried_and_loses_nothing() -> None:
    inner = Recording(failures=2)
    sink = BackgroundSink("t", lambda: inner, retry_seconds=0.01)
    for step in range(5):
        sink.log(step, {"a": 1.0})
    wait_until(lambda: len(inner.steps) == 5)
    sink.close()
    assert inner.steps == [0, 1, 2, 3, 4] and inner.closed


def test_a_tracker_that_fails_at_the_end_is_closed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    inner = Recording()
    sink = BackgroundSink("t", lambda: inner, retry_seconds=60.0)
    sink.log(0, {"a": 1.0})
    wait_until(lambda: inner.steps == [0])
    inner.failures = 10
    sink.log(1, {"a": 1.0})
    with caplog.at_level("WARNING", logger="ajet"):
        sink.close()
    assert inner.closed and "missed 1 steps" in caplog.text


def test_a_hanging_tracker_never_blocks_and_says_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    sink = BackgroundSink("t", lambda: Recording(gate=gate), capacity=10)
    for step in range(1000):
        sink.log(step, {"a": 1.0})
    with caplog.at_level("WARNING", logger="ajet"):
        sink.close(0.05)
    gate.set()
    assert "missed 1000 steps" in caplog.text or "missed 999 steps" in caplog.text


def test_a_tracker_that_is_slow_to_close_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Uploading(Recording):
        def close(self) -> None:
            uploaded.wait()

    uploaded, inner = threading.Event(), Uploading()
    sink = BackgroundSink("t", lambda: inner)
    sink.log(0, {"a": 1.0})
    wait_until(lambda: not sink._waiting)
    with caplog.at_level("WARNING", logger="ajet"):
        sink.close(0.05)
    uploaded.set()
    assert "tracker t took too long at the run's end" in caplog.text


def test_a_sink_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class MySink:\n"
        "    def __init__(self, run):\n"
        "        self.file = (run.folder / 'mine.txt').open('w')\n"
        "    def log(self, step, metrics):\n"
        "        self.file.write(f'{step} {metrics}\\n')\n"
        "    def close(self):\n"
        "        self.file.close()\n"
    )
    sink = make_tracker(f"{tmp_path / 'mine.py'}->MySink", Config(), tmp_path, Masker())
    sink.log(3, {"reward/mean": 0.5})
    sink.close()
    assert (tmp_path / "mine.txt").read_text() == "3 {'reward/mean': 0.5}\n"


def test_a_tracker_without_its_package_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = make_config({"trainer_common.logger": ["console", "swanlab"]})
    sinks = make_sinks(config, tmp_path, Masker())
    sinks.log(1, {"reward/mean": 0.5})
    sinks.close()
    assert "0.5" in (tmp_path / "metrics.jsonl").read_text()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "'swanlab' is left out" in said and "pip install swanlab" in said
    assert list(missing_trackers(config)) == ["swanlab"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "swanlab", "mlflow"])
def test_installed_trackers_write_into_the_folder_and_learn_no_secret(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(name)
    for variable in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["ajet", "--conf", "a.yaml", "service.api_key=canary-77b1e2"])
    config = Config.model_validate({"service": {"api_key": "canary-77b1e2", "+odd (key)": 1}})
    sink = make_tracker(name, config, tmp_path, Masker(config.model_dump(mode="json")))
    assert isinstance(sink, BackgroundSink)
    sink.log(1, {"reward/mean": 0.5, "val/success/pass@4": 1.0, "user/a+b": 1.0, "user//c": float("nan")})
    sink.log(3, {"val/success": 0.5})
    sink.log(2, {"val/success": 0.5})  # as an asynchronous trainer: it is behind its explorer
    wait_until(lambda: not sink._waiting, 60.0)
    print("canary-77b1e2")
    sink.close(120.0)
    assert not sink._waiting, "no name is refused"
    assert "ignored" not in capfd.readouterr().err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(b"canary-77b1e2" in path.read_bytes() for path in files)


def test_tensorboard_draws_a_step_that_a_resumed_run_did_again_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def run(events: list[dict[str, Any]], steps: range, metrics: dict[str, float]) -> None:
        with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(event)}\n" for event in events))
        sink = make_tracker("tensorboard", Config(), tmp_path, Masker())
        assert isinstance(sink, BackgroundSink)
        for step in steps:
            sink.log(step, metrics)
        sink.close(120.0)

    run([{"event": "started"}], range(1, 6), {"reward/mean": 1.0})
    run([{"event": "resumed"}, {"event": "rewound", "step": 3}], range(4, 7), {"reward/mean": 2.0})
    run([{"event": "resumed"}], range(6, 7), {"val/return/mean": 1.0})  # only validates, and takes nothing away
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in found] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
