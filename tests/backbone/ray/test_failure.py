"""What went wrong: the last error of a driver's log, and what Ray's errors wrap."""

from __future__ import annotations

from pathlib import Path

from ajet.backbone.ray.facts import RunError
from ajet.backbone.ray.watcher import actor_named, last_error

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


def test_a_log_without_an_error_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text("one\n\ntwo\n")
    assert last_error(log) == "one\ntwo"
    assert last_error(tmp_path / "none") == "it wrote nothing"


def test_an_error_of_rays_is_told_by_what_the_actor_raised() -> None:
    class TaskError(Exception):
        cause = KeyError("answer")

    assert RunError.of(TaskError("ray::Explorer.explore()\n  a long traceback")).text == "KeyError: 'answer'"
    assert RunError.of(ValueError("no rows\nin the store")).text == "ValueError: no rows\nin the store"
    assert actor_named(["The actor died.", "\tclass_name: Trainer", "\tpid: 7"]) == " (Trainer)"
