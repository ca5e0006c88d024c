"""Batches of runs: everything is run once, whatever is interrupted, and counted right."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from ajet.agents import ReActAgent, Trajectory, read_trajectory
from ajet.agents.batch import GIVE_UP_AFTER, Batch, BatchError, Prices, demonstrations, run_batch
from ajet.agents.tools import ToolContext, tool
from ajet.environment.sandboxes import SandboxSettings
from ajet.schema.task import Task
from support.scripted_models import Scripted, asks, call

TASKS = [Task(task_id=f"t{number}", main_query=str(number)) for number in range(3)]


async def verdict(task: Task, trajectory: Trajectory) -> None:
    trajectory.is_success = trajectory.final_response == task.main_query
    trajectory.reward = float(trajectory.is_success)


class Echo:
    """Answers with the question, except for the runs in `wrong`; raises from the `breaks_after`th call on."""

    takes_tools = True

    def __init__(self, breaks_after: float = math.inf) -> None:
        self.calls = 0
        self.breaks_after = breaks_after

    async def __call__(self, messages: Any, **_: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls > self.breaks_after:
            raise ConnectionError("down")
        return {"content": messages[-1]["content"], "usage": {"prompt_tokens": 1000, "completion_tokens": 100}}


def batch(out: Path, model: Any, **given: Any) -> Batch:
    values = {"repeats": 2, "judge": verdict, "model_name": "m", **given}
    return Batch(ReActAgent(system_prompt=""), TASKS, lambda: model, out, **values)


def test_all_runs_and_again_none(tmp_path: Path) -> None:
    model = Echo()
    done = asyncio.run(run_batch(batch(tmp_path, model, prices=Prices(1.0, 10.0))))
    assert [(trajectory.task_id, trajectory.repeat) for trajectory in done] == [
        (task.task_id, repeat) for task in TASKS for repeat in range(2)
    ]
    assert model.calls == 6 and all(trajectory.reward == 1.0 for trajectory in done)
    assert done[0].cost == pytest.approx(0.002)
    assert read_trajectory(tmp_path / "t0-1.jsonl") == done[1]
    told: list[Trajectory] = []
    again = asyncio.run(run_batch(batch(tmp_path, model, prices=Prices(1.0, 10.0), on_end=told.append)))
    assert again == done and told == done and model.calls == 6


def test_it_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    model = Echo(breaks_after=4)
    first = asyncio.run(run_batch(batch(tmp_path, model, concurrency=1)))
    assert [trajectory.failure is None for trajectory in first] == [True] * 4 + [False] * 2
    torn = (tmp_path / "t0-0.jsonl").read_bytes()
    (tmp_path / "t0-0.jsonl").write_bytes(torn[: len(torn) // 2])  # killed while it ran
    healthy = Echo()
    second = asyncio.run(run_batch(batch(tmp_path, healthy)))
    assert healthy.calls == 3 and all(trajectory.reward == 1.0 for trajectory in second)


@pytest.mark.parametrize("text", ["", '{"trajectory": {"request'])
def test_a_file_that_was_hardly_begun_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "t0-0.jsonl").write_text(text)
    assert all(trajectory.reward == 1.0 for trajectory in asyncio.run(run_batch(batch(tmp_path, Echo()))))


def test_a_model_that_never_answers_ends_the_batch(tmp_path: Path) -> None:
    model = Echo(breaks_after=0)
    with pytest.raises(BatchError, match="down"):
        asyncio.run(run_batch(batch(tmp_path, model, repeats=100, concurrency=4)))
    assert GIVE_UP_AFTER <= model.calls < GIVE_UP_AFTER + 4


def test_a_judge_that_raises_fails_its_run_alone(tmp_path: Path) -> None:
    async def picky(task: Task, trajectory: Trajectory) -> None:
        if task.task_id == "t1":
            raise KeyError("answer")
        await verdict(task, trajectory)

    done = asyncio.run(run_batch(batch(tmp_path, Echo(), judge=picky)))
    failed = [trajectory.request_id for trajectory in done if trajectory.failure is not None]
    assert failed == ["t1-0", "t1-1"]
    assert asyncio.run(run_batch(batch(tmp_path, Echo())))[2].failure is None


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1"])
def test_a_judges_reward_that_is_no_number_is_a_failure(tmp_path: Path, reward: Any) -> None:
    async def odd(task: Task, trajectory: Trajectory) -> None:
        trajectory.reward, trajectory.is_success = reward, True

    done = asyncio.run(run_batch(batch(tmp_path, Echo(), judge=odd)))
    assert all("not a finite number" in str(trajectory.failure) for trajectory in done)
    assert {(trajectory.reward, trajectory.is_success) for trajectory in done} == {(None, None)}
    assert asyncio.run(run_batch(batch(tmp_path, Echo())))[0].reward == 1.0  # as one that failed, it was run again


def test_a_folder_of_another_model_is_left_alone(tmp_path: Path) -> None:
    asyncio.run(run_batch(batch(tmp_path, Echo())))
    with pytest.raises(BatchError, match="choose another folder"):
        asyncio.run(run_batch(batch(tmp_path, Echo(), model_name="other")))


def run_with(out: Path, model: Any, tasks: Any = TASKS, settings: Any = None, **given: Any) -> list[Trajectory]:
    agent = ReActAgent(**{"system_prompt": "", "sampling": {"temperature": 0.7}, **(settings or {})})
    values = {"judge": verdict, "judge_name": "verdict", "model_name": "m", **given}
    return asyncio.run(run_batch(Batch(agent, tasks, lambda: model, out, **values)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"settings": {"sampling": {"temperature": 0.0}}}, "sampling"),
        ({"settings": {"tools": ["calculator"]}}, "tools"),
        ({"settings": {"system_prompt": "Be brief."}}, "agent"),
        ({"settings": {"max_steps": 3}}, "agent"),
        ({"settings": {"name": "other"}}, "agent"),
        ({"tasks": [Task(task_id="t0", main_query="0", metadata={"answer": 7})]}, "task"),
        ({"tasks": [Task(task_id="t0", main_query="zero")]}, "task"),
        ({"judge_name": "another"}, "judge"),
        ({"model_name": "other", "settings": {"max_steps": 3}}, "agent, model"),
        ({"sandbox": SandboxSettings(kind="none")}, "sandbox"),
    ],
)
def test_results_of_other_settings_are_not_taken_for_this_batchs(
    tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    model = Echo()
    run_with(tmp_path, model)
    with pytest.raises(BatchError, match=rf"t0-0\.jsonl was made with another {named}: choose another folder"):
        run_with(tmp_path, model, **other)
    assert model.calls == 3


def test_what_no_result_depends_on_may_change(tmp_path: Path) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "nothing"

    class Own(ReActAgent):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.helper, self.lock, self.words = str.upper, threading.Lock(), {"b", "a"}

    model = Echo()
    first = Batch(Own(tools=[look]), TASKS[:2], lambda: model, tmp_path, prices=Prices(1.0, 1.0))
    assert len(asyncio.run(run_batch(first))) == 2
    again = Batch(Own(tools=[look]), TASKS, lambda: model, tmp_path, concurrency=1, prices=Prices(2.0, 2.0))
    done = asyncio.run(run_batch(again))
    assert model.calls == 3
    assert [trajectory.cost for trajectory in done] == [pytest.approx(0.0022)] * 3


class Door:
    """A tool that opens for all runs but those in `shut`."""

    name, description, parameters = "door", "A door.", {"type": "object", "properties": {}}

    def __init__(self, *shut: str) -> None:
        self.closed = shut

    async def open(self, context: ToolContext) -> Any:
        if context.episode_id in self.closed:
            raise ConnectionError("it is shut")
        return self

    async def close(self) -> None: ...


def test_a_tool_that_does_not_open_fails_its_run_alone(tmp_path: Path) -> None:
    model = Echo()
    door = Door("t0-0", "t1-0")
    done = run_with(tmp_path, model, settings={"tools": [door]})
    assert [trajectory.failure is None for trajectory in done] == [False, False, True] and model.calls == 1
    assert "it is shut" in str(read_trajectory(tmp_path / "t0-0.jsonl").failure)
    door.closed = ()
    again = run_with(tmp_path, model, settings={"tools": [door]})
    assert all(trajectory.reward == 1.0 for trajectory in again) and model.calls == 3


def test_a_model_or_a_sandbox_that_cannot_be_made_fails_its_run_alone(tmp_path: Path) -> None:
    models = iter([Echo(), None, Echo()])

    def make() -> Any:
        made = next(models)
        if made is None:
            raise RuntimeError("no memory left")
        return made

    done = asyncio.run(run_batch(Batch(ReActAgent(), TASKS, make, tmp_path / "m", concurrency=1)))
    assert [str(trajectory.stop_reason) for trajectory in done] == ["answer", "agent_error", "answer"]
    assert read_trajectory(tmp_path / "m" / "t1-0.jsonl") == done[1]
    settings = SandboxSettings(kind="docker", image="no/such:image")
    done = run_with(tmp_path / "s", Echo(), sandbox=settings)
    assert [trajectory.failure and trajectory.failure.kind for trajectory in done] == ["SandboxError"] * 3


def test_a_task_may_change_its_sandbox(tmp_path: Path) -> None:
    seen = []

    @tool
    async def where(context: ToolContext) -> None:
        """Tells."""
        assert context.sandbox is not None
        seen.append((context.episode_id, (await context.sandbox.exec("echo $WHERE")).stdout.decode().strip()))

    asked = {"a": {"environment": {"WHERE": "here"}}, "b": {"network": "none"}, "c": None}
    tasks = [Task(task_id=name, main_query="?", metadata={"sandbox": asked[name]}) for name in asked]
    settings = SandboxSettings(kind="none", network="host", environment={"WHERE": "there"})
    model = lambda: Scripted(asks(call("where")), "done")  # noqa: E731
    done = asyncio.run(run_batch(Batch(ReActAgent(tools=[where]), tasks, model, tmp_path, sandbox=settings)))
    assert sorted(seen) == [("a-0", "here"), ("c-0", "there")]
    assert "a task's `sandbox` may have" in str(done[1].failure)


def test_a_batch_whose_runs_all_fail_ends(tmp_path: Path) -> None:
    tasks = [Task(task_id=f"t{number}", main_query="?") for number in range(100)]
    shut = Door(*(f"t{number}-0" for number in range(100)))
    with pytest.raises(BatchError, match=r"8 runs failed and none succeeded.*it is shut"):
        run_with(tmp_path, Echo(), tasks, {"tools": [shut]}, concurrency=1)


def test_tasks_whose_names_differ_only_in_what_file_names_cannot_hold(tmp_path: Path) -> None:
    tasks = [Task(task_id=name, main_query=name) for name in ("a/b", "a_b", "a b", "x" * 400, "x" * 401)]
    model = Echo()
    done = run_with(tmp_path, model, tasks)
    assert len(list(tmp_path.glob("*.jsonl"))) == 5 and all(trajectory.reward == 1.0 for trajectory in done)
    assert run_with(tmp_path, model, tasks) == done and model.calls == 5


def test_two_tasks_of_one_id(tmp_path: Path) -> None:
    twice = batch(tmp_path, Scripted("x"))
    twice.tasks = [TASKS[0], TASKS[0]]
    with pytest.raises(BatchError, match="two tasks have the id 't0'"):
        asyncio.run(run_batch(twice))


def test_demonstrations_are_the_successful_conversations(tmp_path: Path) -> None:
    done = asyncio.run(run_batch(batch(tmp_path, Echo())))
    done[0].is_success = False
    records = demonstrations(done)
    assert len(records) == 5
    assert records[0]["messages"] == [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
