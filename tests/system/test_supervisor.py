"""Services that end during a run: started again, not too often, and nothing of them is left."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ajet.config import load_config
from ajet.schema.episode import EpisodeStatus
from ajet.schema.task import Task
from ajet.system import services as service_keeper
from ajet.system.processes import still_running
from ajet.system.services import Service, start_service, wanted_services
from ajet.task_runner.runtime import Runtime
from support import SUPPORT
from support.ports import free_port
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AJET_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(service_keeper, "FIRST_PAUSE_S", 0.01)


def service(command: str, **more: Any) -> Service:
    return Service("world", "ajet.services.world", command, Path(), **more)


def starts() -> int:
    return Path("starts").read_text().count("\n") if Path("starts").exists() else 0


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if text in record.getMessage()]


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.levelno >= logging.WARNING for record in caplog.records)


def test_it_is_started_again_and_its_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    command = "echo >> starts; until test -e stop; do sleep 0.05; done; rm stop; echo out of memory; exit 9"
    with start_service(service(command)):
        assert not warned(caplog)
        Path("stop").touch()
        wait_until(lambda: starts() == 2)
        (record,) = said(caplog, "ended with exit code 9")
        assert "out of memory" in record.getMessage() and "start 1 of 3 follows" in record.getMessage()
        wait_until(lambda: len(still_running()) == 1)
    assert still_running() == []


def test_one_that_always_ends_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with start_service(service("echo >> starts; sleep 0.3; exit 9", restarts=2)):
        wait_until(lambda: bool(said(caplog, "episodes that need it will fail")))
    assert starts() == 3
    (last,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "started again 2 times already" in last.getMessage()
    assert still_running() == []


def test_one_that_may_not_be_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with start_service(service("echo >> starts; sleep 0.3; exit 9", restarts=0)):
        wait_until(lambda: bool(said(caplog, "may not be started again")))
    assert starts() == 1


def test_one_that_never_answers_again_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """It listens the first time only; the run can end while it's waited for."""
    address = ("127.0.0.1", free_port())
    listen = f"import socket, time; s = socket.create_server({address!r}); time.sleep(0.5); raise SystemExit(3)"
    command = f'if test -e starts; then echo >> starts; exit 4; fi; echo >> starts; {sys.executable} -c "{listen}"'
    with start_service(service(command, address=address, restarts=2)):
        wait_until(lambda: bool(said(caplog, "episodes that need it will fail")))
    assert starts() == 3
    assert said(caplog, "exit code 4")


def test_one_in_the_background_is_watched_at_its_address(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_keeper, "ASK_S", 0.05)
    address = ("127.0.0.1", free_port())
    listen = f"import os, socket, time; s = socket.create_server({address!r}); open('pid', 'w').write(str(os.getpid()))"
    command = f'echo >> starts; {sys.executable} -c "{listen}; time.sleep(99)" & exit 0'
    with start_service(service(command, address=address)):
        wait_until(lambda: Path("pid").exists() and Path("pid").read_text() != "")
        os.kill(int(Path("pid").read_text()), signal.SIGKILL)
        wait_until(lambda: starts() == 2)
        assert said(caplog, "answers no more")


def test_a_command_that_is_done_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with start_service(service("echo >> starts")):
        wait_until(lambda: starts() == 1)
    assert starts() == 1 and not warned(caplog)


def test_the_run_can_end_during_a_pause(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_keeper, "FIRST_PAUSE_S", 600.0)
    with start_service(service("echo >> starts; sleep 0.3; exit 9")):
        wait_until(lambda: bool(said(caplog, "start 1 of 3")))
    assert starts() == 1


KILLER = """
import os, signal
from pathlib import Path

from ajet import Workflow, WorkflowOutput

class Killer(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(model="any", messages=list(workflow_task.task.init_messages))
        if not Path("killed").exists():
            Path("killed").touch()
            os.kill(int(Path("pid").read_text()), signal.SIGKILL)
        *_, done, _ = workflow_task.gym_env.step("one")
        return WorkflowOutput(reward=1.0, metadata={"done": done})
"""


@pytest.mark.slow
def test_an_episode_on_a_killed_service_is_run_again_on_the_next(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    world = SUPPORT / "worlds.py"
    Path("agent.py").write_text(textwrap.dedent(KILLER))
    Path("replies.yaml").write_text(json.dumps(["one"] * 4))
    serving = f"echo $$ > pid; exec {sys.executable} -m ajet env serve '{world}->Counter' --port {port} --workers 1"
    config = {
        "services": {"world": {"command": serving, "address": f"127.0.0.1:{port}"}},
        "task_reader": {"type": "random_dummy"},
        "rollout": {
            "user_workflow": "agent.py->Killer",
            "engine": "scripted",
            "scripted_replies": "replies.yaml",
            "environment": {"url": f"http://127.0.0.1:{port}"},
            "episode_retries": 5,
            "compute_madness_checklist": [],
        },
    }
    Path("run.yaml").write_text(json.dumps({"ajet": config}))
    loaded = load_config("run.yaml", backbone="debug")
    (wanted,) = wanted_services(loaded, [])
    with start_service(wanted), Runtime(loaded) as runtime:
        episode = runtime.run(runtime.pool.run_episode(Task(task_id="t")))
    assert episode.status is EpisodeStatus.COMPLETED and episode.failure is None
    assert Path("killed").exists() and said(caplog, "was ended by SIGKILL")
    assert still_running() == []
