"""What user code emits reaches its episode, from threads of this process, isolated processes and remote runners."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from ajet import Workflow, WorkflowOutput, emit_message, emit_reward, operation
from ajet.config import make_config
from ajet.observe.episode_codec import decode_episode, encode_episode
from ajet.observe.tracing import get_message_value, get_reward_value
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.task import Task, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.processes import ProcessRunner
from ajet.task_runner.remote import KEY_VARIABLE, RemoteRunner
from ajet.task_runner.runner import TaskRunner
from support.runner_fakes import LineEngine, SmallProvider, runner_of

CODE = """
import threading, time
from ajet import rollout, emit_message, emit_reward, operation, Workflow, WorkflowOutput

@operation
def search(query):
    emit_message(f"looking for {query}")
    return [query]

@rollout
async def agent(task, tuner):
    search("cats")
    thread = threading.Thread(target=emit_message, args=("from a thread",))
    thread.start()
    thread.join()
    emit_reward(0.25)
    emit_reward({"correct": 0.75, "short": 1.0}, primary_key="correct")

@rollout
def plain(task, tuner):
    search("dogs")
    emit_reward(0.5)
    return 1.0
"""


def told(episode: Episode) -> list[Any]:
    return [value for span in episode.spans if (value := get_message_value(span) or get_reward_value(span)) is not None]


async def episode_of(runner: TaskRunner, query: str = "x", episode_id: str = "e1") -> Episode:
    return await runner.run(WorkflowTask(task=Task(task_id="t", main_query=query), episode_uuid=episode_id))


def check(episode: Episode) -> None:
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 0.75), episode.failure
    assert told(episode) == ["looking for cats", "from a thread", 0.25, 0.75]
    assert (episode.reward_parts, episode.reward_weights) == (
        {"correct": 0.75, "short": 1.0},
        {"correct": 1.0, "short": 0.0},
    )
    assert [span.sequence_id for span in episode.spans] == [1, 2, 3, 4, 5]
    assert {(span.rollout_id, span.attempt_id) for span in episode.spans} == {("e1", "e1")}
    assert len({span.trace_id for span in episode.spans}) == 1
    assert episode.spans[0].parent_id == episode.spans[1].span_id, "a message within an operation"
    assert decode_episode(encode_episode(episode)).spans == episode.spans


def agent_file(folder: Path, name: str) -> str:
    (folder / "agent.py").write_text(textwrap.dedent(CODE))
    return f"{folder}/agent.py->{name}"


def workflow_of(folder: Path, name: str) -> type[Workflow]:
    from ajet.task_runner.environments import load_workflow

    return load_workflow(make_config({"rollout.user_workflow": agent_file(folder, name)}))


def test_in_threads(tmp_path: Path) -> None:
    async def run() -> None:
        check(await episode_of(runner_of(workflow_of(tmp_path, "agent"))))

    asyncio.run(run())


def test_what_a_plain_function_returns_beats_what_it_emits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        episode = await episode_of(runner_of(workflow_of(tmp_path, "plain")))
        assert (episode.reward, told(episode)) == (1.0, ["looking for dogs", 0.5])

    from ajet.task_runner.attempt import EmittedSpans

    EmittedSpans._warned = False
    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "returned the reward 1.0 and emitted 0.5: what is returned counts" in caplog.text


def test_in_isolated_processes(tmp_path: Path) -> None:
    async def run() -> None:
        keys = {
            "rollout.user_workflow": agent_file(tmp_path, "agent"),
            "task_runner.wrapper_type": "multi-processing",
        }
        config = make_config(keys)
        sessions = SmallProvider(config, LineEngine("hello"))
        attempts = ProcessRunner(config, sessions)
        try:
            check(await episode_of(TaskRunner(sessions, attempts)))
        finally:
            await attempts.aclose()
            if sessions.gateway is not None:
                await sessions.gateway.aclose()

    asyncio.run(run())


def test_on_runners_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-ajet-" + "k" * 40
    monkeypatch.setenv(KEY_VARIABLE, key)
    keys = {"task_runner.wrapper_type": "remote", "task_runner.remote.port": 0}
    agent_file(tmp_path, "agent")

    async def run() -> None:
        config = make_config(keys)
        sessions = SmallProvider(config, LineEngine("hello"))
        attempts = RemoteRunner(config, sessions, None)
        await attempts.start()
        program = subprocess.Popen(
            [sys.executable, "-m", "ajet", "runner", "--workflow", "agent.py->agent", "--connect", attempts.url],
            cwd=tmp_path,
            env={**os.environ, KEY_VARIABLE: key},
        )
        try:
            async with asyncio.timeout(120):
                check(await episode_of(TaskRunner(sessions, attempts)))
        finally:
            workers = psutil.Process(program.pid).children(recursive=True)
            for each in (program, *workers):
                each.kill()
            program.wait()
            await attempts.aclose()
            if sessions.gateway is not None:
                await sessions.gateway.aclose()

    asyncio.run(run())


class Talkative(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        for index in range(int(workflow_task.task.main_query)):
            emit_message(str(index))
        return WorkflowOutput()


class Judge(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        with operation(name="judging"):
            emit_reward(0.1)
        return 0.9, True


def test_the_rest_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        episode = await episode_of(runner_of(Talkative, judge=Judge), "2500")
        assert (len(episode.spans), episode.spans_left_out) == (2000, 502)
        assert episode.reward == 0.9, "a judge's reward is what it returns"

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert caplog.text.count("more spans than are kept") == 1


def test_a_judge_may_emit_too() -> None:
    async def run() -> None:
        episode = await episode_of(runner_of(Talkative, judge=Judge), "1")
        assert told(episode) == ["0", 0.1]

    asyncio.run(run())
