"""The driver's process, watched: its log, with the last error in it, and its metrics."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ajet.backbone.ray.watcher import (
    LEFT_OUT,
    ChildLog,
    Tail,
    WarningRelay,
    actor_named,
    first_line,
    last_error,
    log_relayed,
)
from ajet.observe.logs import LOST, TRACEBACK

RAY_LOG = """\
\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m Training Progress:   0%|          | 0/3
Traceback (most recent call last):
  File "main_ppo.py", line 155, in run
ray.exceptions.RayTaskError(RuntimeError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=77, ip=10.0.0.1)
RuntimeError: episode worker 0 died: The actor died unexpectedly
\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m Training Progress:   0%|          | 0/3
"""


def test_the_last_error_is_the_cause_and_not_rays_wrapping(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text(RAY_LOG)
    assert last_error(log) == "RuntimeError: episode worker 0 died: The actor died unexpectedly"


def test_a_plain_exception_is_found(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text("Traceback (most recent call last):\n    raise Exception(\nException: The current node timed out.\n")
    assert last_error(log) == "Exception: The current node timed out."


def test_a_dead_actor_is_named(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text(
        "ray.exceptions.ActorDiedError: The actor died.\n\tclass_name: WorkerDict\n\tactor_id: 1\n\tpid: 7\n"
    )
    assert last_error(log) == "ray.exceptions.ActorDiedError: The actor died. (WorkerDict)"
    assert actor_named(["The actor died.", "\tclass_name: Trainer", "\tpid: 7"]) == " (Trainer)"


def test_a_log_without_an_error_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text("one\n\ntwo\n")
    assert last_error(log) == "one\ntwo"
    assert last_error(tmp_path / "none") == "it wrote nothing"


def test_a_metrics_line_counts_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail) == []
    record = {"step": 1, "data": {"reward/mean": 1.0}}
    line = json.dumps(record)
    path.write_text(line[:10])
    assert list(tail) == []
    path.write_text(line + "\n" + line[:5])
    assert list(tail) == [record]
    assert list(tail) == []


def test_a_warning_of_another_process_is_logged_here_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there, relay, here = logging.Logger("there"), WarningRelay(tmp_path / "w"), Tail(tmp_path / "w")
    there.addHandler(relay)
    log_relayed(here)
    there.info("nothing")
    relay.handle(logging.makeLogRecord({"name": "verl.utils", "levelno": logging.WARNING, "msg": "its own"}))
    there.warning("%s in episode %s", "timeout", "e7", extra={TRACEBACK: "line 3", LOST: True})
    try:
        raise KeyError("answer")
    except KeyError:
        there.exception("group %(name)s failed", {"name": "g"})
    log_relayed(here)
    log_relayed(here)
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("there", "WARNING", "timeout in episode e7"),
        ("there", "ERROR", "group g failed"),
    ]
    assert caplog.records[0].msg == "%s in episode %s"  # by which the terminal knows warnings of one kind
    assert getattr(caplog.records[0], TRACEBACK) == "line 3"
    assert [hasattr(record, LOST) for record in caplog.records] == [True, False]
    assert "KeyError: 'answer'" in getattr(caplog.records[1], TRACEBACK)


def test_the_childs_log_holds_neither_secrets_nor_the_payload(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print('key sk-secret'); print({'ajet_run': 'PAYLOAD'})"], stdout=subprocess.PIPE
    )
    log = ChildLog(child, tmp_path / "log", payload="PAYLOAD", mask=lambda text: text.replace("sk-secret", "***"))
    child.wait()
    log.finish()
    assert (tmp_path / "log").read_text() == f"key ***\n{{'ajet_run': '{LEFT_OUT}'}}\n"


def test_an_actor_that_could_not_start_says_why() -> None:
    started = "The actor died because of an error raised in its creation task, ray::explorer:AjetExplorer.__init__()"
    assert first_line(ValueError(f"{started}\nTraceback:\n  …\nModuleNotFoundError: no trinity")).endswith("no trinity")
    assert first_line(ValueError("The actor died unexpectedly.\n\tclass_name: AjetTrainer")) == (
        "The actor died unexpectedly."
    )
    assert first_line(ValueError("no rows\nin the store")) == "no rows"
    assert first_line(KeyError()) == "KeyError"


def test_a_ray_without_enough_is_named_and_is_no_sign_of_life(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says so for ever."""
    said = (
        "(autoscaler +17s) Error: No available node types can fulfill resource request "
        "defaultdict(<class 'float'>, {'CPU': 3.0, 'GPU': 1.0}). Add suitable node types to this cluster."
    )
    program = f"import time; print('start', flush=True); time.sleep(0.5); print({said!r})"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    log = ChildLog(child, tmp_path / "log", payload="", mask=str)
    child.wait()
    ended = time.monotonic()
    log.finish()
    assert said in (tmp_path / "log").read_text()
    assert log.spoke < ended - 0.4
    assert "no machine of this Ray has {'CPU': 3.0, 'GPU': 1.0}" in caplog.text
