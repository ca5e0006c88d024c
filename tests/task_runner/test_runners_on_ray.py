"""`ajet runner --with-ray`: runners as actors of a real Ray cluster of one node."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from ajet.cli.main import main
from ajet.config import make_config
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.remote import KEY_VARIABLE, RemoteRunner
from ajet.task_runner.runner import TaskRunner
from support.ports import free_port
from support.runner_fakes import LineEngine, SmallProvider
from support.waiting import until

KEY = "sk-ajet-" + "k" * 40
RAY = Path(sys.executable).with_name("ray")
AGENT = """
import asyncio, os
from pathlib import Path
from ajet import Workflow, WorkflowOutput

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        together = Path(workflow_task.task.main_query)
        together.mkdir(exist_ok=True)
        (together / str(os.getppid())).touch()
        while len(list(together.iterdir())) < 2:  # two runners are at work at a time
            await asyncio.sleep(0.05)
        return WorkflowOutput(reward=1, metadata={"runner": os.getppid()})
"""


def test_ray_and_a_number_are_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setitem(sys.modules, "ray", None)
    command = ["runner", "--connect", "http://127.0.0.1:1", "--workflow", "agent.py->Agent"]
    assert main([*command, "--with-ray", "2"]) == 2
    assert "--with-ray needs Ray: pip install ray" in capsys.readouterr().err
    for more, says in (
        (["--with-ray", "0"], "write a whole number, at least 1"),
        (["--ray-address", "a:1"], "goes with --with-ray"),
    ):
        assert main([*command, *more]) == 2
        assert says in capsys.readouterr().err


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray with one node of four CPUs."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    folder = tempfile.mkdtemp(prefix="ajet-ray-", dir="/tmp")  # paths of its sockets must be short
    port = free_port()
    start = [RAY, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=4"]
    start += ["--num-gpus=0", "--include-dashboard=false", f"--temp-dir={folder}", "--object-store-memory=100000000"]
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0", "PYTHONUNBUFFERED": "1"}
    program = subprocess.Popen(start, env={**os.environ, **own}, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert program.stdout is not None
        for line in program.stdout:
            if b"Ray runtime started" in line:
                break
        yield f"127.0.0.1:{port}"
    finally:
        started = [program, *psutil.Process(program.pid).children(recursive=True)]
        program.terminate()
        psutil.wait_procs(started[1:], timeout=30)
        for each in started:
            if each.poll() is None if isinstance(each, subprocess.Popen) else each.is_running():
                each.kill()
        program.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.skipif(find_spec("ray") is None or not RAY.exists(), reason="needs Ray: run `make test-verl`")
def test_ray_places_replaces_and_drains_runners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    (tmp_path / "agent.py").write_text(AGENT)
    config = make_config({"task_runner.wrapper_type": "remote", "task_runner.remote.port": 0})

    async def two(runner: TaskRunner, name: str) -> set[int]:
        """Two episodes at a time. Returns the runners that ran them."""
        tasks = [WorkflowTask(task=Task(task_id=str(n), main_query=str(tmp_path / name))) for n in range(2)]
        done: list[Episode] = await asyncio.gather(*(runner.run(task) for task in tasks))
        assert [one.status for one in done] == [EpisodeStatus.COMPLETED] * 2, done[0].failure
        return {one.metadata["runner"] for one in done}

    async def run() -> None:
        sessions = SmallProvider(config, LineEngine("hello"))
        attempts = RemoteRunner(config, sessions, None)
        await attempts.start()
        command = [sys.executable, "-m", "ajet", "runner", "--connect", attempts.url, "--workflow", "agent.py->Agent"]
        driver = subprocess.Popen([*command, "--with-ray", "2", "--ray-address", cluster, "--name", "r"], cwd=tmp_path)
        try:
            async with asyncio.timeout(300):
                runner = TaskRunner(sessions, attempts)
                first = await two(runner, "first")
                assert len(first) == 2
                killed = min(first)
                actor = psutil.Process(killed).parent()
                assert actor is not None
                actor.kill()  # Ray starts it anew, and its runner has ended with it
                assert killed not in await two(runner, "second")
                at_work = [psutil.Process(pid) for pid in await two(runner, "third")]
                driver.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(driver.wait) == 0
                await until(lambda: not any(each.is_running() for each in at_work))
        finally:
            driver.kill()
            driver.wait()
            await attempts.aclose()
            if sessions.gateway is not None:
                await sessions.gateway.aclose()

    asyncio.run(run())
