"""One episode, however it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import openai
import pytest

from ajet.environment.sandboxes import SandboxError
from ajet.schema.episode import Episode, EpisodeStatus, Outcome
from ajet.schema.errors import (
    ConfigError,
    EngineError,
    EnvironmentUnavailableError,
    JudgeFault,
    LostThreadsError,
    SessionClosedError,
)
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_judge.helper import HelperBudgetError, HelperError
from ajet.task_runner.results import run_workflow
from ajet.task_runner.runner import TaskRunner
from ajet.task_runner.threads import ThreadRunner, _AttemptInThread
from ajet.workflow import Workflow
from support.runner_fakes import SmallProvider, runner_of
from support.waiting import until

QUESTION = [{"role": "user", "content": "hi"}]
TASK = WorkflowTask(task=Task(task_id="t", main_query="hi"), task_id="t", episode_uuid="e", task_thread_index=3)


class Talk(Workflow):
    """One model call; its length is the reward."""

    async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        reply = await client.chat.completions.create(model="any", messages=QUESTION)
        said = reply.choices[0].message.content
        return WorkflowOutput(reward=float(len(said)), metadata={"final_answer": said}, log_metrics={"x": 1})


def workflow_that(act: Any) -> type[Workflow]:
    """A workflow whose `execute` is `act(workflow_task, tuner)`."""

    class Acting(Workflow):
        async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
            return await act(workflow_task, tuner)

    return Acting


def judge_that(answer: Any) -> type[BaseJudge]:
    class Answering(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return answer() if callable(answer) else answer

    return Answering


def run(make: Any, **options: Any) -> Episode:
    """Run one episode with the runner that `make()` builds on the loop."""

    async def main() -> Episode:
        return await make().run(TASK, **options)

    return asyncio.run(main())


async def no_reward(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
    return WorkflowOutput(metadata={"a": 1})


# ---------------------------------------------------------------- ends well


def test_a_completed_episode() -> None:
    episode = run(lambda: runner_of(Talk, "hello"), group_id="g")
    assert (episode.status, episode.reward, episode.failure) == (EpisodeStatus.COMPLETED, 5.0, None)
    assert (episode.episode_id, episode.task_id, episode.group_id, episode.repeat) == ("e", "t", "g", 3)
    assert (episode.metadata, episode.log_metrics) == ({"final_answer": "hello"}, {"x": 1})
    assert episode.timings["total"] >= episode.timings["workflow"] > 0


def test_the_judge_is_asked_only_when_the_reward_is_open() -> None:
    assert run(lambda: runner_of(Talk, "hello", judge=judge_that((9.0, True)))).reward == 5.0
    episode = run(lambda: runner_of(workflow_that(no_reward), judge=judge_that((9.0, False))))
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.COMPLETED, 9.0, False)


def test_an_async_judge_and_the_workflows_own_success() -> None:
    class Slow(BaseJudge):
        async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            await asyncio.sleep(0)
            return np.float32(0.5), np.bool_(False)

    async def act(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        return WorkflowOutput(is_success=True)

    episode = run(lambda: runner_of(workflow_that(act), judge=Slow))
    assert (episode.reward, episode.is_success) == (0.5, True)


def test_a_reward_a_call_and_rewards_by_the_tuner() -> None:
    async def listed(_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(model="any", messages=QUESTION)
        return WorkflowOutput(reward=[0.25])

    async def given(_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        tuner.reward(0.75)
        return WorkflowOutput()

    async def too_many(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=[0.25, 1.0])

    assert run(lambda: runner_of(workflow_that(listed))).reward == 0.25
    assert run(lambda: runner_of(workflow_that(given))).reward == 0.75
    episode = run(lambda: runner_of(workflow_that(too_many)))
    assert (episode.status, episode.reward) == (EpisodeStatus.WORKFLOW_ERROR, None)
    assert episode.failure is not None and episode.failure.kind == "RewardError"


def test_each_episode_has_a_fresh_workflow_and_a_thread_of_its_own() -> None:
    all_ten = threading.Barrier(10, timeout=30)

    class Counting(Workflow):
        seen: int = 0

        async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
            self.seen += 1
            all_ten.wait()  # blocks only itself: it ends when the other nine are here as well
            return WorkflowOutput(reward=self.seen, metadata={"thread": threading.current_thread().name})

    async def main() -> list[Episode]:
        runner = runner_of(Counting)
        return await asyncio.gather(*(runner.run(TASK) for _ in range(10)))

    episodes = asyncio.run(main())
    assert {episode.reward for episode in episodes} == {1.0}
    assert len({episode.metadata["thread"] for episode in episodes}) == 10


def test_what_a_workflow_writes_into_its_task_stays_there() -> None:
    async def act(workflow_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        task = workflow_task.task
        task.init_messages.append({"role": "assistant", "content": "a reply"})
        task.init_messages[0]["content"] += "!"
        task.metadata["notes"]["seen"] = True
        workflow_task.task_id = workflow_task.task_tag = "another"
        workflow_task.task_thread_index = 7
        return WorkflowOutput(reward=len(task.init_messages))

    task = Task(task_id="t", init_messages=[{"role": "user", "content": "hi"}], metadata={"notes": {}})

    async def twice() -> list[Any]:
        runner = runner_of(workflow_that(act), "")
        return [await runner.run(WorkflowTask(task=task, task_id="t", task_thread_index=n)) for n in range(2)]

    episodes = asyncio.run(twice())
    assert [episode.reward for episode in episodes] == [2.0, 2.0]
    assert [(one.task_id, one.tag, one.repeat) for one in episodes] == [("t", "", 0), ("t", "", 1)]
    assert (task.init_messages, task.metadata) == ([{"role": "user", "content": "hi"}], {"notes": {}})


def test_an_environment_is_closed_even_if_the_sandbox_cannot_be() -> None:
    class Leased:
        closed = False

        def close(self) -> None:
            self.closed = True

    class Stuck:
        async def close(self) -> None:
            raise OSError("the container does not end")

    async def refused(_targets: Any) -> Any:
        raise EngineError("no model")

    environment: Any = Leased()
    sandbox: Any = Stuck()
    work = run_workflow(Talk, None, TASK, refused, environment=environment, sandbox=sandbox)
    with pytest.raises(OSError, match="does not end"):
        asyncio.run(work)
    assert environment.closed


def test_the_targets_that_train_reach_the_session() -> None:
    class Two(Workflow):
        trainable_targets: list[str] | None = ["solver"]  # noqa: RUF012 - a pydantic field

        async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
            return WorkflowOutput(reward=0)

    async def main() -> tuple[str, ...]:
        runner = runner_of(Two)
        await runner.run(TASK, step=7)
        assert isinstance(runner.sessions, SmallProvider)
        (attempt,) = runner.sessions.attempts
        assert attempt.step == 7
        return attempt.trainable_targets

    assert asyncio.run(main()) == ("solver",)


def test_a_target_that_is_no_list_is_refused() -> None:
    class One(Talk):
        trainable_targets: Any = "solver"

    async def main() -> Any:
        return (await runner_of(One).run(TASK)).failure

    failure = asyncio.run(main())
    assert failure is not None
    assert failure.message == "One.trainable_targets is 'solver', not a list: write ['solver']"


# ---------------------------------------------------------------- the workflow fails


def raiser(error: BaseException) -> Any:
    async def act(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        raise error

    return act


def returner(value: Any) -> Any:
    async def act(_task: WorkflowTask, _tuner: Any) -> Any:
        return value

    return act


@pytest.mark.parametrize(
    ("act", "kind", "says"),
    [
        (raiser(KeyError("x")), "KeyError", "'x'"),
        (raiser(SystemExit(3)), "SystemExit", "3"),
        (raiser(KeyboardInterrupt()), "KeyboardInterrupt", ""),
        (raiser(asyncio.CancelledError()), "CancelledError", ""),
        (raiser(ExceptionGroup("several", [ValueError("a")])), "ExceptionGroup", "several"),
        (returner(None), "WorkflowFault", "returned None of type NoneType, not a WorkflowOutput: write `return"),
        (returner(1.0), "WorkflowFault", "of type float"),
        (
            returner(WorkflowOutput(reward=float("nan"))),
            "RewardError",
            "must be a finite number, not nan",
        ),
        (
            returner(WorkflowOutput(reward=[1.0, float("inf")])),
            "RewardError",
            "reward[1] must be a finite number",
        ),
        (returner(WorkflowOutput(reward=[])), "RewardError", "empty list"),
        (no_reward, "RewardError", "there is no judge"),
    ],
)
def test_a_workflow_that_fails_is_named(act: Any, kind: str, says: str) -> None:
    episode = run(lambda: runner_of(workflow_that(act)))
    assert (episode.status, episode.reward, episode.attempts) == (EpisodeStatus.WORKFLOW_ERROR, None, 1)
    assert episode.failure is not None and episode.failure.kind == kind
    assert says in episode.failure.message
    # ours, of what a workflow returned: there is no line of the user's to show
    assert bool(episode.failure.traceback) == (kind not in ("WorkflowFault", "RewardError"))


def test_the_traceback_shows_the_users_line() -> None:
    episode = run(lambda: runner_of(workflow_that(raiser(KeyError("x")))))
    assert episode.failure is not None
    assert "raise error" in episode.failure.traceback
    assert "results.py" not in episode.failure.traceback


async def asks_a_dead_server(*_: Any) -> WorkflowOutput:
    async with openai.AsyncOpenAI(base_url="http://me:secret@127.0.0.1:9/v1", api_key="k", max_retries=0) as client:
        await client.chat.completions.create(model="judge", messages=[{"role": "user", "content": "?"}])
    raise AssertionError("it answered")


def test_a_client_that_reaches_nobody_says_whom() -> None:
    """The client's own message is `Connection error.`"""
    episode = run(lambda: runner_of(workflow_that(asks_a_dead_server)))
    assert episode.failure is not None
    assert episode.failure.message == "Connection error. (http://127.0.0.1:9/v1/chat/completions)"
    assert "in asks_a_dead_server" in episode.failure.place


# ---------------------------------------------------------------- the judge fails


@pytest.mark.parametrize("answer", [None, float("nan"), float("inf"), [1.0], "1.0", (None, True)])
def test_a_judge_that_answers_wrongly_is_a_fault_and_never_zero(answer: Any) -> None:
    asked = []
    judge = judge_that(lambda: (asked.append(1), answer)[1])
    episode = run(lambda: runner_of(workflow_that(no_reward), judge=judge))
    assert (episode.status, episode.reward) == (EpisodeStatus.JUDGE_ERROR, None)
    assert episode.failure is not None and episode.failure.kind == "JudgeFault"
    assert len(asked) == 1


def test_a_workflow_that_could_not_score_its_episode_is_a_fault_and_never_paid() -> None:
    async def unscored(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        raise JudgeFault("the rubric's model is down")

    for judge in (None, judge_that(1.0)):
        rules = {"judge": judge, "failure_reward__workflow_error": 0}
        episode = run(lambda rules=rules: runner_of(workflow_that(unscored), **rules))
        assert (episode.status, episode.reward) == (EpisodeStatus.JUDGE_ERROR, None)


@pytest.mark.parametrize("error", [ConnectionError("busy"), SandboxError("it did not start within 60 s")])
def test_a_judge_that_raises_is_asked_again_without_running_the_workflow_again(error: Exception) -> None:
    asked = []

    def flaky() -> tuple[float, bool]:
        asked.append(1)
        if len(asked) == 1:
            raise error
        return 1.0, True

    episode = run(lambda: runner_of(workflow_that(no_reward), judge=judge_that(flaky)))
    assert (episode.status, episode.reward, episode.attempts, len(asked)) == (EpisodeStatus.COMPLETED, 1.0, 1, 2)
    assert episode.failure is None

    def broken() -> None:
        raise ConnectionError("busy")

    episode = run(lambda: runner_of(workflow_that(no_reward), judge=judge_that(broken)))
    assert (episode.status, episode.reward) == (EpisodeStatus.JUDGE_ERROR, None)
    assert episode.failure is not None and episode.failure.kind == "ConnectionError"


async def raising(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
    raise KeyError("mine")


# ---------------------------------------------------------------- the model and the engine


class Growing(Workflow):
    """Its second prompt is too long, and it catches nothing."""

    async def execute(self, workflow_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        for length in (1, 100):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * length}])
        raise AssertionError("unreachable")


def test_an_overflow_let_through_without_a_judge() -> None:
    episode = run(lambda: runner_of(Growing, max_model_len=10, failure_reward__otherwise=-0.25))
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.TRUNCATED, -0.25, False)
    assert episode.failure is not None and "maximum context length" in episode.failure.message
    episode = run(lambda: runner_of(Growing, max_model_len=10, failure_reward__overflow=-1))
    assert (episode.status, episode.reward) == (EpisodeStatus.TRUNCATED, -1.0)
    episode = run(lambda: runner_of(Growing, max_model_len=10, failure_reward__overflow="drop"))
    assert (episode.status, episode.reward) == (EpisodeStatus.TRUNCATED, None)


def test_an_overflow_let_through_is_judged() -> None:
    seen = []

    class Looking(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            seen.append(workflow_output)
            return 0.5, False

    episode = run(lambda: runner_of(Growing, "hello", max_model_len=10, judge=Looking))
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.TRUNCATED, 0.5, False)
    assert seen == [WorkflowOutput(metadata={"ended_early": "overflow", "last_reply": "hello"})]
    assert episode.failure is not None and episode.failure.kind == "BadRequestError"
    run(lambda: runner_of(Growing, max_model_len=10, judge=Looking, failure_reward__overflow=-1))
    assert len(seen) == 1  # a number needs no judge
    run(lambda: runner_of(workflow_that(raising), judge=Looking))
    assert len(seen) == 1  # an error of the workflow's own is not judged


def test_a_judge_that_cannot_judge_an_early_end_is_not_at_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Needing(BaseJudge):
        def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
            return float(workflow_output.metadata["final_answer"] == "hello")

    async def main() -> list[Episode]:
        runner = runner_of(Growing, "hello", max_model_len=10, judge=Needing, failure_reward__otherwise=-0.25)
        return [await runner.run(TASK) for _ in range(3)]

    for episode in asyncio.run(main()):
        assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.TRUNCATED, -0.25, False)
        assert episode.failure is not None and episode.failure.kind == "BadRequestError"
    told = [record.getMessage() for record in caplog.records if "can't judge an episode" in record.getMessage()]
    assert len(told) == 1 and "KeyError" in told[0]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (HelperError("it is down"), EpisodeStatus.JUDGE_ERROR),
        (HelperBudgetError("it is used up"), EpisodeStatus.JUDGE_ERROR),
        (EnvironmentUnavailableError("it is down"), EpisodeStatus.ENVIRONMENT_ERROR),
    ],
)
def test_an_early_end_that_a_dead_service_kept_from_its_judge_is_not_paid(
    error: Exception, status: EpisodeStatus
) -> None:
    def asking() -> None:
        raise error

    rules = {"max_model_len": 10, "failure_reward__otherwise": -0.25}
    episode = run(lambda: runner_of(Growing, "hello", judge=judge_that(asking), **rules))
    assert (episode.status, episode.reward) == (status, None)


def test_a_reward_given_on_the_way_counts_before_otherwise() -> None:
    async def act(_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        tuner.reward(0.75)
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(model="any", messages=QUESTION)
        return WorkflowOutput()

    episode = run(lambda: runner_of(workflow_that(act), max_model_len=1))
    assert (episode.status, episode.reward) == (EpisodeStatus.TRUNCATED, 0.75)


def test_a_client_that_refuses_a_cut_reply() -> None:
    import openai

    async def act(_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        reply = await client.chat.completions.create(model="any", messages=QUESTION)
        tracker.outcomes.add(Outcome.LENGTH)
        raise openai.LengthFinishReasonError(completion=reply)

    tracker: Any = None

    async def main() -> Episode:
        nonlocal tracker
        runner = runner_of(workflow_that(act), judge=judge_that((0.25, False)))
        opened = runner.sessions.open_session

        async def open_session(attempt: Any) -> Any:
            nonlocal tracker
            session = await opened(attempt)
            tracker = session.tracker
            return session

        runner.sessions.open_session = open_session  # type: ignore[method-assign]
        return await runner.run(TASK)

    episode = asyncio.run(main())
    assert (episode.status, episode.reward) == (EpisodeStatus.TRUNCATED, 0.25)


def test_an_overflow_that_the_workflow_handles_is_judged() -> None:
    async def act(_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        import openai

        client = tuner.as_raw_openai_sdk_client()
        try:
            await client.chat.completions.create(model="any", messages=QUESTION)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
        return WorkflowOutput(reward=0.25)

    episode = run(lambda: runner_of(workflow_that(act), max_model_len=1))
    assert (episode.status, episode.reward) == (EpisodeStatus.TRUNCATED, 0.25)


def test_a_fault_of_the_engine_is_retried_with_a_session_of_its_own() -> None:
    async def main() -> None:
        runner = runner_of(Talk, EngineError("gone"), "hello")
        episode = await runner.run(TASK)
        assert (episode.status, episode.reward, episode.attempts) == (EpisodeStatus.COMPLETED, 5.0, 2)
        assert isinstance(runner.sessions, SmallProvider)
        assert [session.episode_id for session in runner.sessions.sessions] == ["e", "e.2"]

    asyncio.run(main())


def test_an_engine_that_stays_away() -> None:
    episode = run(lambda: runner_of(Talk, EngineError("gone"), rollout__episode_retries=2))
    assert (episode.status, episode.reward, episode.attempts) == (EpisodeStatus.ENGINE_ERROR, None, 3)
    assert episode.failure is not None and "gone" in episode.failure.message


def test_a_session_that_can_never_open_ends_the_run() -> None:
    async def main() -> None:
        runner = runner_of(Talk)

        async def broken(_order: Any) -> Any:
            raise ConfigError("ajet.model.path: no such model")

        runner.sessions.open_session = broken  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="no such model"):
            await runner.run(TASK)

    asyncio.run(main())


def test_an_engine_that_failed_to_load_ends_the_run_of_episodes_that_began_before() -> None:
    async def main() -> None:
        runner = runner_of(Talk, EngineError("no endpoint is left"))
        assert isinstance(runner.sessions, SmallProvider)
        runner.sessions.refusal = ConfigError("ajet.rollout.engine: remote can't be used: wrong API key")
        with pytest.raises(ConfigError, match="wrong API key"):
            await runner.run(TASK)

    asyncio.run(main())


# ---------------------------------------------------------------- deadlines, stops, hangs


def hanging(how: str) -> Any:
    async def act(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        while True:
            if how == "await":
                await asyncio.sleep(60)
            elif how == "spin":
                sum(range(100))
            elif how == "stubborn":
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
            else:
                time.sleep(0.05)

    return act


@pytest.mark.parametrize("how", ["await", "spin", "sleep", "stubborn"])
def test_a_hang_ends_at_the_deadline_and_its_thread_soon_after(how: str) -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        runner = runner_of(workflow_that(hanging(how)), rollout__episode_timeout=0.3)
        episode = await runner.run(TASK)
        assert (episode.status, episode.reward) == (EpisodeStatus.TIMEOUT, None)
        assert episode.failure is not None and "episode_timeout" in episode.failure.message
        assert "in act" in episode.failure.traceback
        assert isinstance(runner.sessions, SmallProvider)
        (session,) = runner.sessions.sessions
        with pytest.raises(SessionClosedError):
            session.check_open()
        if how != "stubborn":
            new = set(threading.enumerate()) - before
            await until(lambda: not any(thread.name.startswith("ajet-episode") and thread.is_alive() for thread in new))

    asyncio.run(main())


def test_model_calls_in_flight_end_with_the_episode() -> None:
    async def main() -> None:
        runner = runner_of(Talk, rollout__episode_timeout=0.3)
        assert isinstance(runner.sessions, SmallProvider)
        runner.sessions.engine.gate = asyncio.Event()
        episode = await runner.run(TASK)
        assert episode.status is EpisodeStatus.TIMEOUT
        await until(lambda: runner.sessions.engine.cancelled == 1)

    asyncio.run(main())


@pytest.mark.parametrize("paid", ["drop", -1])
def test_the_deadline_covers_the_judge_whose_missing_reward_stays_missing(paid: Any) -> None:
    judge = judge_that(lambda: time.sleep(5))
    rules = {"rollout__episode_timeout": 0.2, "failure_reward__timeout": paid}
    episode = run(lambda: runner_of(workflow_that(no_reward), judge=judge, **rules))
    assert (episode.status, episode.reward) == (EpisodeStatus.JUDGE_ERROR, None)
    assert episode.failure is not None and episode.failure.kind == "JudgeTimeout"
    assert "ajet.rollout.episode_timeout: the judge had not decided" in episode.failure.message


def test_a_judge_that_begins_after_the_deadline_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process shows where it is, its workflow goes on."""
    late, judged = threading.Event(), threading.Event()

    async def slow(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        await asyncio.to_thread(late.wait, 10)
        return WorkflowOutput()

    async def where(_attempt: Any) -> str:
        late.set()
        await asyncio.to_thread(judged.wait, 10)
        return ""

    monkeypatch.setattr(_AttemptInThread, "where", where)
    judge = judge_that(judged.set)
    episode = run(lambda: runner_of(workflow_that(slow), judge=judge, rollout__episode_timeout=0.2))
    assert judged.is_set() and episode.status is EpisodeStatus.TIMEOUT


def test_a_judge_that_was_interrupted_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[threading.Thread] = []
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def endless() -> None:
        calls.append(threading.current_thread())
        while True:
            time.sleep(0.01)

    async def main() -> Episode:
        judge = judge_that(endless)
        runner = runner_of(workflow_that(no_reward), judge=judge, rollout__episode_timeout=0.2)
        episode = await runner.run(TASK)
        await until(lambda: not calls[0].is_alive())
        return episode

    assert asyncio.run(main()).status is EpisodeStatus.JUDGE_ERROR
    assert len(calls) == 1 and not raised


def test_no_deadline_while_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        await asyncio.sleep(0.3)
        return WorkflowOutput(reward=1)

    def make() -> TaskRunner:
        return runner_of(workflow_that(slow), rollout__episode_timeout=0.1)

    assert run(make).status is EpisodeStatus.TIMEOUT
    monkeypatch.setenv("AJET_DEBUG_TAGS", "X")
    assert run(make).status is EpisodeStatus.COMPLETED


def test_stopping_and_cancelling() -> None:
    async def main() -> None:
        runner = runner_of(workflow_that(hanging("await")))
        assert isinstance(runner.sessions, SmallProvider)
        sessions = runner.sessions.sessions
        stop = asyncio.Event()
        running = asyncio.create_task(runner.run(TASK, stop=stop))
        await until(lambda: len(sessions) == 1)
        stop.set()
        episode = await running
        assert (episode.status, episode.reward) == (EpisodeStatus.CANCELLED, None)
        assert (await runner.run(TASK, stop=stop)).status is EpisodeStatus.CANCELLED

        running = asyncio.create_task(runner.run(TASK))
        await until(lambda: len(sessions) == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert all(session.closed for session in sessions)

    asyncio.run(main())


def test_too_many_threads_that_hang_for_good_end_the_run() -> None:
    release = threading.Event()

    async def blocked(_task: WorkflowTask, _tuner: Any) -> WorkflowOutput:
        release.wait()  # in C, where no exception reaches it
        return WorkflowOutput(reward=1)

    async def main() -> None:
        runner = runner_of(workflow_that(blocked), grace_s=0.05, max_lost=2, rollout__episode_timeout=0.1)
        for _ in range(3):
            assert (await runner.run(TASK)).status is EpisodeStatus.TIMEOUT
        assert isinstance(runner.attempts, ThreadRunner)
        threads = runner.attempts.threads
        await until(lambda: len(threads.lost) == 3)
        with pytest.raises(LostThreadsError, match=r"wrapper_type: multi-processing(.|\n)*release.wait"):
            await runner.run(TASK)
        release.set()
        await until(lambda: not threads.lost)
        assert (await runner.run(TASK)).status is EpisodeStatus.COMPLETED

    asyncio.run(main())


def test_blocking_client_inside_async_code_stops_only_itself() -> None:
    """A synchronous call from `async def execute`, while the service loop answers it."""

    async def act(_task: WorkflowTask, tuner: Any) -> WorkflowOutput:
        from ajet.gateway.protocol import Caller
        from ajet.task_runner.tuner.connection import LoopBridge

        bridge = LoopBridge(Caller(tuner._session), tuner._loop)
        body = b'{"model": "any", "messages": [{"role": "user", "content": "hi"}]}'
        answer, _ = bridge.ask_blocking("POST", "/v1/chat/completions", body, 5.0)
        assert isinstance(answer.body, bytes)
        return WorkflowOutput(reward=float(b"hello" in answer.body))

    assert run(lambda: runner_of(workflow_that(act))).reward == 1.0
