"""A plain `def execute`, and a plain judge: no event loop is running, so code that starts its own works."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_process_runner import episode_of, play

from ajet.schema.episode import Episode, EpisodeStatus, Outcome
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.runner import TaskRunner
from ajet.workflow import Workflow
from support.runner_fakes import SmallProvider, runner_of
from support.waiting import until

MESSAGES = [{"role": "user", "content": "hi"}]
TASK = WorkflowTask(task=Task(task_id="t", main_query="hi"), task_id="t", episode_uuid="e")


def plain(act: Any) -> type[Workflow]:
    class Plain(Workflow):
        def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
            return act(workflow_task, tuner)

    return Plain


def run(act: Any, **options: Any) -> Episode:
    async def main() -> Episode:
        return await runner_of(plain(act), **options).run(TASK)

    return asyncio.run(main())


async def say(client: Any) -> str:
    reply = await client.chat.completions.create(messages=MESSAGES)
    return str(reply.choices[0].message.content)


def test_it_may_start_loops_of_its_own() -> None:
    def act(_task: Any, tuner: Any) -> WorkflowOutput:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        client, model = tuner.as_raw_openai_sdk_client(), tuner.as_model_function()
        said = [asyncio.run(say(client)), asyncio.run(say(client))]
        said.append(asyncio.run(model(MESSAGES))["content"])
        with pytest.raises(RuntimeError, match="no current event loop"):
            asyncio.get_event_loop()  # as in any thread, after asyncio.run
        return WorkflowOutput(reward=float(len(said)), metadata={"said": said})

    episode = run(act)
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 3.0), episode.failure
    assert episode.metadata == {"said": ["hello"] * 3}


def test_it_has_a_loop_to_run_until_complete() -> None:
    def act(_task: Any, tuner: Any) -> WorkflowOutput:
        loop = asyncio.get_event_loop()
        client = tuner.as_raw_openai_sdk_client()
        said = [loop.run_until_complete(say(client)) for _ in range(2)]
        return WorkflowOutput(reward=float(len(said)))

    assert run(act).reward == 2.0


def test_blocking_clients() -> None:
    def act(_task: Any, tuner: Any) -> WorkflowOutput:
        model = tuner.as_langchain_model()
        return WorkflowOutput(metadata={"said": model.invoke("hi").content}, reward=0)

    assert run(act).metadata == {"said": "hello"}


def test_it_may_return_an_awaitable() -> None:
    async def later(tuner: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=float(len(await say(tuner.as_raw_openai_sdk_client()))))

    assert run(lambda _task, tuner: later(tuner)).reward == 5.0


def test_a_plain_judge_too() -> None:
    class Judge(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return asyncio.run(self.think())

        async def think(self) -> tuple[float, bool]:
            return 0.5, True

    assert run(lambda _task, _tuner: WorkflowOutput(), judge=Judge).reward == 0.5


@pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3), asyncio.CancelledError()])
def test_its_errors_are_the_episodes(error: BaseException) -> None:
    def act(_task: Any, _tuner: Any) -> WorkflowOutput:
        raise error

    episode = run(act)
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.failure is not None
    assert "in act" in episode.failure.traceback and "call_off_loop" not in episode.failure.traceback


def test_an_iterator_without_items() -> None:
    """A coroutine can't raise StopIteration; Python names it as the cause."""
    episode = run(lambda _task, _tuner: next(iter([])))
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.failure is not None
    assert "StopIteration" in episode.failure.message


def test_a_model_call_that_ends_it_is_judged() -> None:
    def act(_task: Any, tuner: Any) -> WorkflowOutput:
        return asyncio.run(long(tuner.as_raw_openai_sdk_client()))

    async def long(client: Any) -> WorkflowOutput:
        await client.chat.completions.create(messages=[{"role": "user", "content": "x" * 2000}])
        raise AssertionError("unreachable")

    class Judge(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return 0.25, False

    episode = run(act, judge=Judge)
    assert (episode.reward, episode.outcomes) == (0.25, (Outcome.OVERFLOW,))


def hanging(how: str) -> Any:
    async def wait() -> None:
        while True:
            with suppress(asyncio.CancelledError if how == "stubborn" else ZeroDivisionError):
                await asyncio.sleep(60)

    def act(_task: Any, tuner: Any) -> WorkflowOutput:
        while True:
            if how in ("run", "stubborn"):
                asyncio.run(wait())
            elif how == "until_complete":
                asyncio.get_event_loop().run_until_complete(wait())
            elif how == "model":
                tuner.as_langchain_model().invoke("hi")
            else:
                time.sleep(0.05)

    return act


@pytest.mark.slow
@pytest.mark.parametrize("how", ["run", "until_complete", "stubborn", "sleep", "model"])
def test_a_hang_ends_at_the_deadline_and_its_thread_soon_after(how: str) -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        runner = runner_of(plain(hanging(how)), rollout__episode_timeout=0.3)
        assert isinstance(runner.sessions, SmallProvider)
        if how == "model":
            runner.sessions.engine.gate = asyncio.Event()
        episode = await runner.run(TASK)
        assert (episode.status, episode.reward) == (EpisodeStatus.TIMEOUT, None)
        assert episode.failure is not None and "in act" in episode.failure.traceback
        new = set(threading.enumerate()) - before
        await until(lambda: not any(thread.name.startswith("ajet-episode") and thread.is_alive() for thread in new))

    asyncio.run(main())


@pytest.mark.slow
def test_stopping_ends_the_loop_it_started() -> None:
    began, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def main() -> None:
        stop = asyncio.Event()
        runner = runner_of(plain(lambda _task, _tuner: asyncio.run(wait())), grace_s=60.0)
        running = asyncio.create_task(runner.run(TASK, stop=stop))
        await until(began.is_set)
        stop.set()
        assert (await running).status is EpisodeStatus.CANCELLED
        await until(ended.is_set)

    asyncio.run(main())


def test_in_a_process(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        episode = await episode_of(runner, "run")
        assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 10.0), episode.failure
        episode = await episode_of(runner, "raise")
        assert episode.failure is not None and episode.failure.kind == "KeyError"
        assert "in execute" in episode.failure.traceback
        assert (await episode_of(runner, "judge")).reward == 0.75

    play(tmp_path, scene, workflow="Plain", code=PLAIN)


@pytest.mark.slow
def test_a_hang_in_a_process(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner, _sessions: SmallProvider) -> None:
        episode = await episode_of(runner, "hang")
        assert episode.status is EpisodeStatus.TIMEOUT
        assert episode.failure is not None and "in execute" in episode.failure.traceback

    play(tmp_path, scene, workflow="Plain", code=PLAIN, rollout__episode_timeout=2.0)


PLAIN = """
import asyncio
from ajet import Workflow, WorkflowOutput
from ajet.task_judge.base_judge import BaseJudge

class Plain(Workflow):
    def execute(self, workflow_task, tuner):
        act = workflow_task.task.main_query
        if act == "raise":
            raise KeyError("mine")
        if act == "hang":
            asyncio.run(asyncio.sleep(60))
        if act == "judge":
            return WorkflowOutput()
        client = tuner.as_raw_openai_sdk_client()
        return WorkflowOutput(reward=sum(asyncio.run(self.say(client)) for _ in range(2)))

    async def say(self, client):
        reply = await client.chat.completions.create(messages=[{"role": "user", "content": "hi"}])
        return len(reply.choices[0].message.content)

class Judge(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        return asyncio.run(asyncio.sleep(0, (0.75, True)))
"""
