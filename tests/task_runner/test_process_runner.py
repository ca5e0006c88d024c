"""`wrapper_type: multi-processing`: real processes that crash, hang, exit and lie."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ajet.config import make_config
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import EngineError, ImportPathError, user_line
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner import processes
from ajet.task_runner.processes import ProcessRunner
from ajet.task_runner.runner import TaskRunner
from support import TESTS
from support.detached import is_gone
from support.runner_fakes import LineEngine, SmallProvider
from support.waiting import until, wait_until

CODE = """
from __future__ import annotations
import asyncio, ctypes, json, os, random, signal, subprocess, sys, time
from ajet import Workflow, WorkflowOutput
from ajet.task_judge.base_judge import BaseJudge
from support.detached import detach

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        act = workflow_task.task.main_query
        if act == "exit":
            os._exit(7)
        if act == "segfault":
            ctypes.string_at(0)
        if act == "raise":
            raise KeyError("mine")
        if act == "unspeakable":
            class Unspeakable(Exception):
                def __str__(self):
                    return self.nothing
            raise Unspeakable
        if act == "sys_exit":
            sys.exit(3)
        if act == "hang":
            print("before the hang", file=sys.stderr, flush=True)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            while True:
                time.sleep(60)
        if act == "await":
            async def forever():
                await asyncio.sleep(600)
            await forever()
        if act == "spawn":
            child = subprocess.Popen(["sleep", "600"])
            with open(workflow_task.task.metadata["file"], "w") as file:
                file.write(str(child.pid))
            time.sleep(60)
        if act == "hang once" and not os.path.exists(workflow_task.task.metadata["file"]):
            open(workflow_task.task.metadata["file"], "w").close()
            time.sleep(60)
        if act.startswith("detach"):
            detach(workflow_task.task.metadata["file"])
            time.sleep(60 if act == "detach and hang" else 0)
            return WorkflowOutput(reward=1)
        if act == "garbage":
            for descriptor in range(3, 20):
                try:
                    os.write(descriptor, b"not json\\n")
                except OSError:
                    pass
            os._exit(0)
        if act == "leave a task":
            asyncio.get_running_loop().create_task(asyncio.sleep(600))
        if act == "leave what never ends":
            async def stubborn():
                while True:
                    try:
                        await asyncio.sleep(600)
                    except asyncio.CancelledError:
                        pass
            asyncio.get_running_loop().create_task(stubborn())
            await asyncio.sleep(0)
        if act == "where" or act.startswith("leave"):
            return WorkflowOutput(reward=1, metadata={"pid": os.getpid(), "random": random.random(),
                "heavy": sorted({"torch", "transformers"} & set(sys.modules)), "when": object(),
                "size": tuner.config.frozen_lake.size, "yaml": str(tuner.config.yaml_path)})
        if act.startswith("judge"):
            return WorkflowOutput(metadata={"act": act})
        client = tuner.as_raw_openai_sdk_client()
        if act.startswith("early"):
            for length in (1, 2000):
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * length}])
        reply = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
        if act == "reward":
            tuner.reward(0.5)
            return WorkflowOutput()
        return WorkflowOutput(reward=len(reply.choices[0].message.content))

class Judge(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        act = workflow_output.metadata.get("act")
        if "ended_early" in workflow_output.metadata:
            if workflow_task.task.main_query == "early_exit":
                os._exit(9)
            if workflow_task.task.main_query == "early_raise":
                return workflow_output.metadata["final_answer"]
            return len(workflow_output.metadata["last_reply"]) / 10, False
        if act == "judge_exit":
            os._exit(9)
        if act == "judge_hang":
            time.sleep(60)
        if act == "judge_none":
            return None
        if act == "judge_nan":
            return float("nan"), True
        return 0.25, False

class Unconstructed(Workflow):
    def __init__(self, **fields):
        os._exit(4)
    async def execute(self, workflow_task, tuner): ...
"""

Scene = Callable[[TaskRunner, SmallProvider], Awaitable[None]]


def play(
    folder: Path,
    scene: Scene,
    *lines: str | BaseException,
    workflow: str = "Agent",
    code: str = CODE,
    **overrides: Any,
) -> None:
    """Run `scene` with a runner whose workflows are isolated."""
    (folder / "agent.py").write_text(textwrap.dedent(code))
    keys = {
        "rollout.user_workflow": f"{folder}/agent.py->{workflow}",
        "task_judge.judge_protocol": f"{folder}/agent.py->Judge",
        "task_runner.wrapper_type": "multi-processing",
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }

    async def main() -> None:
        config = make_config(keys, frozen_lake={"size": 8})
        config.remember_source(folder / "run.yaml")
        sessions = SmallProvider(config, LineEngine(*(lines or ("hello",))))
        attempts = ProcessRunner(config, sessions)
        try:
            await scene(TaskRunner(sessions, attempts), sessions)
        finally:
            await attempts.aclose()
            if sessions.gateway is not None:
                await sessions.gateway.aclose()

    asyncio.run(main())


def episode_of(runner: TaskRunner, act: str, **metadata: Any) -> Awaitable[Episode]:
    task = Task(task_id=act, main_query=act, metadata=metadata)
    return runner.run(WorkflowTask(task=task, task_id=act, episode_uuid=f"e-{act}"))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("lifetime", ["episode", "run"])
def test_good_and_bad_episodes_side_by_side(tmp_path: Path, lifetime: str) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        acts = ["talk", "reward", "judge", "judge_none", "judge_nan", "judge_exit"]
        acts += ["exit", "segfault", "raise", "unspeakable", "sys_exit", "garbage"]
        episodes = dict(zip(acts, await asyncio.gather(*(episode_of(runner, act) for act in acts)), strict=True))
        found = {act: (episode.status.value, episode.reward) for act, episode in episodes.items()}
        assert found == {
            "talk": ("completed", 5.0),
            "reward": ("completed", 0.25),  # the judge is asked, as its reward is open
            "judge": ("completed", 0.25),
            "judge_none": ("judge_error", None),
            "judge_nan": ("judge_error", None),
            "judge_exit": ("judge_error", None),
            "exit": ("workflow_error", None),
            "segfault": ("workflow_error", None),
            "raise": ("workflow_error", None),
            "unspeakable": ("workflow_error", None),
            "sys_exit": ("workflow_error", None),
            "garbage": ("workflow_error", None),
        }
        messages = {act: episode.failure.message for act, episode in episodes.items() if episode.failure}
        assert messages["exit"] == "the workflow's process exited with code 7"
        assert messages["segfault"] == "the workflow's process was killed by SIGSEGV"
        assert messages["judge_exit"] == "the judge's process exited with code 9"
        assert messages["raise"] == "'mine'"
        assert messages["unspeakable"] == "(its message can't be shown: AttributeError)"
        assert "unreadable" in messages["garbage"]
        segfault = episodes["segfault"].failure
        assert segfault is not None and "Segmentation fault" in segfault.traceback
        assert "agent.py" in segfault.traceback and "in execute" in segfault.traceback
        assert all(episode.attempts == 1 for episode in episodes.values())

    play(tmp_path, scene, task_runner__process_lifetime=lifetime)


@pytest.mark.slow
def test_a_hang_is_killed_and_shows_where(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        await runner.attempts.ready()
        for act, said, function in (("hang", "before the hang", "execute"), ("await", "", "forever")):
            episode = await episode_of(runner, act)
            assert episode.status is EpisodeStatus.TIMEOUT
            assert episode.failure is not None
            assert said in episode.failure.traceback
            assert user_line(episode.failure.traceback).endswith(f"in {function}")
        late = await episode_of(runner, "judge_hang")
        assert (late.status, late.reward) == (EpisodeStatus.JUDGE_ERROR, None), "the workflow was in time"
        assert late.failure is not None and "in compute_reward" in late.failure.traceback

    play(tmp_path, scene, rollout__episode_timeout=1.0)


def test_what_a_worker_started_dies_with_it(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        stop = asyncio.Event()
        file = tmp_path / "pid"
        task = Task(task_id="t", main_query="spawn", metadata={"file": str(file)})
        running = asyncio.create_task(runner.run(WorkflowTask(task=task), stop=stop))
        await until(lambda: file.exists() and file.read_text())
        child = int(file.read_text())
        assert is_alive(child)
        stop.set()
        assert (await running).status is EpisodeStatus.CANCELLED
        await until(lambda: not is_alive(child))

    play(tmp_path, scene)


def test_what_has_detached_itself_dies_with_its_worker(tmp_path: Path) -> None:
    def task(name: str, act: str) -> WorkflowTask:
        return WorkflowTask(task=Task(task_id=name, main_query=act, metadata={"file": str(tmp_path / name)}))

    def gone(name: str) -> bool:
        return is_gone(int((tmp_path / name).read_text()))

    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        stop = asyncio.Event()
        neighbour = asyncio.create_task(runner.run(task("neighbour", "detach and hang"), stop=stop))
        await until((tmp_path / "neighbour").exists)
        await runner.run(task("own", "detach"))
        await until(lambda: gone("own"))
        assert not gone("neighbour"), "it belongs to a worker that still works"
        stop.set()
        await neighbour
        await until(lambda: gone("neighbour"))

    play(tmp_path, scene)


def test_what_has_detached_itself_dies_at_the_deadline(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        task = Task(task_id="t", main_query="detach and hang", metadata={"file": str(tmp_path / "pid")})
        assert (await runner.run(WorkflowTask(task=task))).status is EpisodeStatus.TIMEOUT
        await until(lambda: is_gone(int((tmp_path / "pid").read_text())))

    play(tmp_path, scene, rollout__episode_timeout=1.0)


@pytest.mark.slow
def test_workers_are_fresh_light_and_see_the_users_config(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        one, two = await asyncio.gather(episode_of(runner, "where"), episode_of(runner, "where"))
        assert one.metadata["pid"] != two.metadata["pid"]
        assert one.metadata["random"] != two.metadata["random"]
        assert one.metadata["heavy"] == []
        assert one.metadata["size"] == 8 and one.metadata["yaml"] == str(tmp_path / "run.yaml")
        assert one.metadata["when"].startswith("<object object")

    play(tmp_path, scene)


@pytest.mark.slow
def test_a_worker_that_stays_runs_the_next_episode_unless_it_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "CLEARING_S", 0.5)

    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        assert isinstance(runner.attempts, ProcessRunner)
        workers = runner.attempts.workers

        async def process(act: str) -> int:
            episode = await episode_of(runner, act)
            assert episode.status is EpisodeStatus.COMPLETED, episode.failure
            pid = episode.metadata["pid"]
            assert isinstance(pid, int)
            await until(lambda: not workers._clearing)
            return pid

        first = await process("where")
        assert await process("leave a task") == first
        assert (await episode_of(runner, "raise")).status is EpisodeStatus.WORKFLOW_ERROR
        await until(lambda: not workers._clearing)
        assert await process("leave what never ends") == first
        await until(lambda: is_gone(first))
        second = await process("where")
        assert second != first
        assert (await episode_of(runner, "exit")).status is EpisodeStatus.WORKFLOW_ERROR
        third = await process("where")
        os.kill(third, signal.SIGKILL)  # while it waits for the next
        await until(lambda: not workers._idle[0].is_there)
        fourth = await process("where")
        assert fourth not in (first, second, third)
        last.append(fourth)

    last: list[int] = []
    play(tmp_path, scene, task_runner__process_lifetime="run")
    wait_until(lambda: is_gone(last[0]))
    assert caplog.text.count("could not be used again, and was replaced") == 1


@pytest.mark.slow
def test_what_the_model_ended_is_judged_in_the_worker(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        episodes = [await episode_of(runner, act) for act in ("early", "early_raise", "early_exit")]
        assert [episode.status for episode in episodes] == [EpisodeStatus.TRUNCATED] * 3
        assert [episode.reward for episode in episodes] == [0.5, -0.25, -0.25]

    play(tmp_path, scene, failure_reward__otherwise=-0.25)


def test_a_workflow_that_dies_while_it_is_made(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        episode = await episode_of(runner, "any")
        assert episode.status is EpisodeStatus.WORKFLOW_ERROR
        assert episode.failure is not None and "exited with code 4" in episode.failure.message

    play(tmp_path, scene, workflow="Unconstructed")


@pytest.mark.slow
def test_the_engines_faults_are_known_through_http_too(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, sessions: SmallProvider) -> None:
        episode = await episode_of(runner, "talk")
        assert (episode.status, episode.reward, episode.attempts) == (EpisodeStatus.COMPLETED, 5.0, 2)
        assert [session.episode_id for session in sessions.sessions] == ["e-talk", "e-talk.2"]

    play(tmp_path, scene, EngineError("gone"), "hello")


@pytest.mark.slow
def test_code_that_cannot_be_imported_is_refused_by_name(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        with pytest.raises(ImportPathError, match=r"ajet.rollout.user_workflow: .*Agnt.*did you mean 'Agent'"):
            await episode_of(runner, "talk")

    play(tmp_path, scene, workflow="Agnt")


def test_a_task_that_is_no_json_is_named(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        episode = await episode_of(runner, "where", thing=Path)
        assert (episode.status, episode.attempts) == (EpisodeStatus.WORKFLOW_ERROR, 1)
        assert episode.failure is not None
        assert episode.failure.message.startswith("the task can't be sent to a process: Unable to serialize")

    play(tmp_path, scene)


@pytest.mark.slow
def test_a_fork_server_that_dies_is_replaced_and_its_episodes_are_run_again(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        assert isinstance(runner.attempts, ProcessRunner)
        await runner.attempts.ready()
        file = tmp_path / "begun"
        running = asyncio.ensure_future(episode_of(runner, "hang once", file=str(file)))
        await until(file.exists)
        os.kill(runner.attempts.workers._server._process.pid, signal.SIGKILL)
        episode = await running
        assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 5.0), episode.failure
        assert (await episode_of(runner, "talk")).reward == 5.0

    play(tmp_path, scene)


@pytest.mark.slow
def test_no_process_outlives_the_one_that_runs_the_episodes(tmp_path: Path) -> None:
    """SIGKILL it: server and workers end by themselves."""
    (tmp_path / "agent.py").write_text(textwrap.dedent(CODE))
    program = f"""
import asyncio, sys
sys.path[:0] = [{str(TESTS)!r}]
from support.detached import is_gone
from support.runner_fakes import LineEngine, SmallProvider
from ajet.config import make_config
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.processes import ProcessRunner
from ajet.task_runner.runner import TaskRunner

async def main():
    config = make_config({{"rollout.user_workflow": "{tmp_path}/agent.py->Agent",
                           "task_runner.wrapper_type": "multi-processing"}})
    sessions = SmallProvider(config, LineEngine("x"))
    attempts = ProcessRunner(config, sessions)
    print(attempts.workers._server._process.pid, flush=True)
    task = Task(task_id="t", main_query="spawn", metadata={{"file": "{tmp_path}/pid"}})
    await TaskRunner(sessions, attempts).run(WorkflowTask(task=task))

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        file = tmp_path / "pid"
        wait_until(lambda: file.exists() and file.read_text())
        child = int(file.read_text())
        assert is_alive(server) and is_alive(child)
        process.kill()
    wait_until(lambda: not is_alive(server) and not is_alive(child))
