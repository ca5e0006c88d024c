"""`rollout.sandbox`: made for each episode, seen by its workflow and judge, and always destroyed."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ajet.config import make_config
from ajet.environment.sandboxes import SandboxError
from ajet.schema.episode import Episode
from ajet.schema.task import Task
from ajet.task_runner.environments import sandbox_settings
from support.runner_fakes import played

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

AGENT = """
import asyncio, os, time
from ajet import Workflow, WorkflowOutput
from ajet.task_judge.base_judge import BaseJudge

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        act, _, rest = workflow_task.task.main_query.partition(" ")
        result = await tuner.sandbox.exec(rest or "echo inside > file; cat file")
        if act == "hang":
            await tuner.sandbox.exec("setsid sleep " + workflow_task.task.metadata["mark"] + " >/dev/null &")
            while True:
                time.sleep(0.01)
        if act == "raise":
            await tuner.sandbox.exec("setsid sleep " + workflow_task.task.metadata["mark"] + " >/dev/null &")
            raise KeyError("mine")
        if act == "die":
            tuner.sandbox.kill()
            await tuner.sandbox.exec("true")
        if act == "gateway":
            ask = (
                "import sys, urllib.request as r\\n"
                "request = r.Request(sys.argv[1] + '/models', headers={'Authorization': 'Bearer ' + sys.argv[2]})\\n"
                "print(r.urlopen(request).read()[:40])"
            )
            key = tuner.as_oai_baseurl_apikey().api_key
            result = await tuner.sandbox.exec(["python3", "-c", ask, tuner.sandbox.gateway_url, key])
        output = (result.stdout + result.stderr).decode()
        return WorkflowOutput(reward=1.0, metadata={"output": output, "memory": tuner.sandbox.limits["memory"]})

class Plain(Workflow):
    def execute(self, workflow_task, tuner):
        result = asyncio.run(tuner.sandbox.exec("echo plain"))
        return WorkflowOutput(reward=1.0, metadata={"output": result.stdout.decode()})
"""


def run(
    tmp_path: Path,
    query: str = "look",
    *,
    name: str = "Agent",
    metadata: dict[str, Any] | None = None,
    **overrides: Any,
) -> Episode:
    (tmp_path / "agent.py").write_text(AGENT)
    settings = {
        "rollout.user_workflow": f"{tmp_path}/agent.py->{name}",
        "rollout.sandbox": {"kind": "bubblewrap", "memory_mb": 128, "disk_mb": 8},
        "rollout.episode_retries": 0,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    return played(settings, ["hello"], Task(task_id="t", main_query=query, metadata=metadata or {}))


def gone(mark: str) -> bool:
    """Whether no process of this machine has the mark in its command line."""
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        found = False
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found = found or mark.encode() in place.read_bytes()
        if not found:
            return True
        time.sleep(0.02)
    return False


wrappers = pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])


@needs_bubblewrap
@wrappers
def test_a_workflow_has_its_sandbox(tmp_path: Path, wrapper: str) -> None:
    episode = run(tmp_path, task_runner__wrapper_type=wrapper)
    assert episode.failure is None, episode.failure
    assert episode.metadata["output"] == "inside\n" and episode.metadata["memory"]


@needs_bubblewrap
@wrappers
def test_a_plain_execute_has_it_too(tmp_path: Path, wrapper: str) -> None:
    episode = run(tmp_path, name="Plain", task_runner__wrapper_type=wrapper)
    assert episode.failure is None and episode.metadata["output"] == "plain\n"


@pytest.mark.slow
@needs_bubblewrap
@wrappers
@pytest.mark.parametrize("act", ["raise", "hang"])
def test_it_is_destroyed_whatever_happens(tmp_path: Path, wrapper: str, act: str) -> None:
    mark = f"96{time.monotonic_ns()}"
    limit = {"rollout__episode_timeout": 4.0} if act == "hang" else {}
    episode = run(tmp_path, act, metadata={"mark": mark}, task_runner__wrapper_type=wrapper, **limit)
    assert episode.failure is not None and episode.status == ("timeout" if act == "hang" else "workflow_error")
    assert gone(mark)


@pytest.mark.slow
@needs_bubblewrap
def test_a_sandbox_that_dies_is_a_fault_and_no_lesson(tmp_path: Path) -> None:
    episode = run(tmp_path, "die")
    assert episode.status == "environment_error" and episode.failure is not None
    assert episode.failure.kind == "SandboxError" and episode.reward is None


@pytest.mark.slow
@needs_bubblewrap
@wrappers
def test_the_gateway_alone_is_reached(tmp_path: Path, wrapper: str) -> None:
    box = {"kind": "bubblewrap", "network": "gateway"}
    episode = run(tmp_path, "gateway", rollout__sandbox=box, task_runner__wrapper_type=wrapper)
    assert episode.failure is None, episode.failure
    assert '"object"' in episode.metadata["output"], episode.metadata


def test_what_cannot_be_made_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ajet.environment.sandboxes.bubblewrap_arguments import probe

    probe.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"ajet.rollout.sandbox: sandbox kind bubblewrap: there is no `bwrap` here"):
        run(tmp_path)
    probe.cache_clear()


def test_text_is_the_kind_and_folders_are_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = sandbox_settings(make_config({"rollout.sandbox": "docker"}))
    assert settings is not None and settings.kind == "docker" and settings.network == "none"
    assert settings.lifetime_seconds == 1260
    config = make_config({"rollout.sandbox": {"read_only": ["data"], "kind": "none"}})
    config.remember_source(tmp_path / "run.yaml")
    settings = sandbox_settings(config)
    assert settings is not None and settings.read_only == (str(tmp_path / "data"),) and settings.network == "host"
    with pytest.raises(SandboxError, match=r"rollout.sandbox.read_only: there is no folder 'date'"):
        sandbox_settings(make_config({"rollout.sandbox": {"read_only": ["date"]}}))
    assert sandbox_settings(make_config({})) is None
