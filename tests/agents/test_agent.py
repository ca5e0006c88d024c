"""A run of an agent: what the model is sent, what is recorded, and how it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet.agents import (
    Agent,
    AgentRun,
    AgentSettingsError,
    ReActAgent,
    StepType,
    StopReason,
    ToolAgent,
    Trajectory,
    TrajectoryStatus,
    make_agent,
    read_trajectory,
    register_agent,
)
from ajet.agents.tools import ToolContext, ToolResult, ToolSetupError, tool
from ajet.schema.episode import Failure
from ajet.schema.errors import EnvironmentFault
from support.scripted_models import Scripted, asks, call


def run(agent: Agent, model: Any, prompt: Any = "What is 6*7?", **given: Any) -> Trajectory:
    return asyncio.run(agent.run_trajectory(prompt, model, **given))


def types(trajectory: Trajectory) -> list[str]:
    return [str(step.step_type) for step in trajectory.steps]


def test_the_model_calls_a_tool_and_answers() -> None:
    model = Scripted(asks(call("calculator", {"expression": "6*7"}), content="Let me see."), "It is 42.")
    trajectory = run(ReActAgent(tools=["calculator"], system_prompt="Be brief."), model)
    assert trajectory.final_response == "It is 42."
    assert (trajectory.status, trajectory.stop_reason) == (TrajectoryStatus.COMPLETED, StopReason.ANSWER)
    assert types(trajectory) == ["observation", "thought", "action", "action_result", "final_answer"]
    first, second = model.requests
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 6*7?"},
    ]
    assert second["messages"][2:] == [model.replies[0], {"role": "tool", "tool_call_id": "c1", "content": "42"}]
    assert [tool["function"]["name"] for tool in second["tools"]] == ["calculator"]
    assert trajectory.messages == [*second["messages"], {"role": "assistant", "content": "It is 42."}]


def test_the_text_format_for_a_model_without_tools() -> None:
    async def model(messages: list[dict[str, Any]]) -> str:
        if len(messages) == 2:
            assert "calculator" in messages[0]["content"]
            return 'Thought: multiply\nAction: calculator\nAction Input: {"expression": "6*7"}'
        assert messages[-1] == {"role": "user", "content": "Observation: 42"}
        return "Thought: done\nFinal Answer: 42"

    trajectory = run(ReActAgent(tools=["calculator"]), model)
    assert trajectory.final_response == "42"
    assert trajectory.tool_calls[0].tool_args == {"expression": "6*7"}


def test_stops_of_the_sampling_join_those_of_the_text_format() -> None:
    async def model(messages: Any, *, stop: Any) -> str:
        stops.append(stop)
        return "Final Answer: 42"

    stops: list[Any] = []
    for own in ("END", ["END", "HALT"], None):
        run(ReActAgent(sampling={"stop": own}), model)
    assert stops == [["\nObservation:", "END"], ["\nObservation:", "END", "HALT"], ["\nObservation:"]]


def test_a_tool_that_ends_the_run_leaves_no_other_acting() -> None:
    ended: list[str] = []

    @tool
    async def wait() -> str:
        """Waits."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")
        return ""

    @tool
    async def fail() -> str:
        """Its world is gone."""
        raise EnvironmentFault("gone")

    async def main() -> None:
        model = Scripted(asks(call("wait", {}, "a"), call("fail", {}, "b")))
        with pytest.raises(EnvironmentFault):
            await ReActAgent(tools=[wait, fail]).run_trajectory("?", model)
        await asyncio.sleep(0)
        assert ended

    asyncio.run(main())


def test_what_the_model_does_wrong_is_told_to_it() -> None:
    model = Scripted(
        asks(call("calculater", {"expression": "1"})),
        asks(call("calculator", "not json")),
        asks(call("calculator", {"expresion": "1"})),
        asks(call("calculator", {"expression": "1/0"})),
        "I give up.",
    )
    trajectory = run(ReActAgent(tools=["calculator"]), model)
    told = [step for step in trajectory.steps if step.step_type is StepType.ACTION_RESULT]
    assert [step.success for step in told] == [False] * 4
    for step, says in zip(told, ("calculator", "JSON", "expression", "zero"), strict=True):
        assert says in step.content
    assert trajectory.is_completed


def test_a_tool_that_raises_or_never_returns() -> None:
    @tool
    def broken() -> str:
        """Raises."""
        raise RuntimeError("no such luck")

    @tool(timeout=0.01)
    async def endless() -> str:
        """Never returns."""
        await asyncio.Event().wait()
        return ""

    @tool
    def chatty() -> str:
        """Says too much."""
        return "x" * 1_000_000

    model = Scripted(asks(call("broken", {}, "1"), call("endless", {}, "2"), call("chatty", {}, "3")), "Well.")
    trajectory = run(ReActAgent(tools=[broken, endless, chatty], max_output_chars=500), model)
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert "no such luck" in results[0] and "did not finish" in results[1] and len(results[2]) < 700


def test_tools_of_one_reply_run_at_the_same_time_and_answer_in_order() -> None:
    first_waits = asyncio.Event()

    @tool
    async def first() -> str:
        """Waits for the second."""
        await first_waits.wait()
        return "first"

    @tool
    async def second() -> str:
        """Lets the first go on."""
        first_waits.set()
        return "second"

    both = asks(call("first", {}, "1"), call("second", {}, "2"))
    trajectory = run(ReActAgent(tools=[first, second]), Scripted(both, "ok"))
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == ["first", "second"]


def test_a_finish_tool_ends_the_run_with_its_answer() -> None:
    model = Scripted(asks(call("finish", {"answer": "42"})))
    trajectory = run(ReActAgent(tools=["calculator", "finish"]), model)
    assert (trajectory.final_response, trajectory.stop_reason) == ("42", StopReason.TOOL)
    assert trajectory.pending == [{"role": "tool", "tool_call_id": "c1", "content": "42"}]


def test_the_tool_agent_runs_one_call_a_step_and_ends_by_finish() -> None:
    model = Scripted(
        "42, I think.",
        asks(call("calculator", {"expression": "6*7"}, "1"), call("calculator", {"expression": "1"}, "2")),
        asks(call("finish", {"answer": "42"})),
    )
    trajectory = run(ToolAgent(tools=["calculator"]), model)
    assert trajectory.final_response == "42"
    assert "finish" in model.requests[1]["messages"][-1]["content"]
    results = [message["content"] for message in model.requests[2]["messages"] if message["role"] == "tool"]
    assert results[0] == "42" and "only one tool call" in results[1]
    assert model.requests[0]["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_steps": 3}, StopReason.MAX_STEPS),
        ({"max_tokens": 25}, StopReason.MAX_TOKENS),
    ],
)
def test_a_model_that_never_finishes(limits: dict[str, Any], reason: StopReason) -> None:
    model = Scripted(asks(call("calculator", {"expression": "1"})), usage=(100, 10))
    trajectory = run(ReActAgent(tools=["calculator"], **limits), model)
    assert (trajectory.stop_reason, trajectory.status) == (reason, TrajectoryStatus.TRUNCATED)
    assert len(model.requests) == 3
    assert trajectory.usage.output_tokens == 30 and trajectory.usage.input_tokens == 300


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_each_call_may_use_what_is_left_of_the_tokens_under_the_name_that_the_model_takes(name: str) -> None:
    model = Scripted(asks(call("calculator", {"expression": "1"})), usage=(100, 10))
    run(ReActAgent(tools=["calculator"], max_tokens=25, sampling={name: 20}), model)
    sent = [{key: value for key, value in request.items() if "_tokens" in key} for request in model.requests]
    assert sent == [{name: 20}, {name: 15}, {name: 5}]


def test_a_model_that_never_answers_is_stopped_by_the_clock() -> None:
    async def silent(messages: Any, **_: Any) -> str:
        await asyncio.Event().wait()
        return ""

    trajectory = run(ReActAgent(max_seconds=0.05), silent)
    assert trajectory.stop_reason is StopReason.MAX_SECONDS and not trajectory.calls


def test_a_reply_that_was_cut_is_no_answer() -> None:
    trajectory = run(ReActAgent(), Scripted("It is 4", finish_reason="length"))
    assert (trajectory.stop_reason, trajectory.status) == (StopReason.REPLY_CUT, TrajectoryStatus.TRUNCATED)
    assert StepType.FINAL_ANSWER not in {step.step_type for step in trajectory.steps}


@pytest.mark.parametrize("finish", ["content_filter", "refusal"])
def test_a_refusal_is_no_answer_and_its_calls_are_not_run(finish: str) -> None:
    model = Scripted(asks(call("finish", {"answer": "42"}), content="I can't"), finish_reason=finish)
    for given in (model, Scripted("I can't help with that.", finish_reason=finish)):
        trajectory = run(ReActAgent(tools=["finish"]), given)
        assert (trajectory.stop_reason, trajectory.status) == (StopReason.REFUSED, TrajectoryStatus.TRUNCATED)
        assert types(trajectory) == ["observation", "thought"] and len(trajectory.calls) == 1


def test_a_reply_that_the_server_gave_up_on_is_a_failure() -> None:
    trajectory = run(ReActAgent(), Scripted("It is 4", finish_reason="abort"), raise_errors=False)
    assert trajectory.stop_reason is StopReason.MODEL_ERROR and trajectory.failure is not None
    assert "abort" in trajectory.failure.message


@pytest.mark.parametrize("where", ["finalize", "answered"])
def test_an_agent_that_raises_after_the_answer_has_failed(where: str, tmp_path: Path) -> None:
    class Late(ReActAgent):
        async def answered(self, run: AgentRun, answer: str, call: int) -> None:
            await super().answered(run, answer, call)
            if where == "answered":
                raise KeyError("too late")

        async def finalize(self, run: AgentRun) -> None:
            raise KeyError("too late")

    with pytest.raises(KeyError, match="too late"):
        run(Late(), Scripted("42"))
    trajectory = run(Late(), Scripted("42"), raise_errors=False, save_to=tmp_path / "t.jsonl")
    assert (trajectory.status, trajectory.stop_reason) == (TrajectoryStatus.FAILED, StopReason.AGENT_ERROR)
    assert trajectory.failure == Failure("KeyError", "'too late'") and trajectory.final_response == "42"
    assert read_trajectory(tmp_path / "t.jsonl") == trajectory


class Unopened:
    """A tool that can't be opened."""

    name, description, parameters = "unopened", "Never opens.", {"type": "object", "properties": {}}

    async def open(self, context: ToolContext) -> Any:
        raise ConnectionError("no way in")


def test_a_tool_that_does_not_open_fails_the_run(tmp_path: Path) -> None:
    agent, model = ReActAgent(tools=["calculator", Unopened()]), Scripted("42")
    with pytest.raises(ConnectionError, match="no way in"):
        run(agent, model)
    trajectory = run(agent, model, raise_errors=False, save_to=tmp_path / "t.jsonl")
    assert (trajectory.status, trajectory.stop_reason) == (TrajectoryStatus.FAILED, StopReason.AGENT_ERROR)
    assert trajectory.failure is not None and "no way in" in trajectory.failure.message
    assert not model.requests and read_trajectory(tmp_path / "t.jsonl") == trajectory


def test_only_an_argument_for_tools_means_native_calls() -> None:
    """A function that takes any keyword may pass them on to nothing."""

    async def model(messages: list[dict[str, Any]], **_: Any) -> str:
        return "Final Answer: 42" if "Observation" in messages[-1]["content"] else 'Action: calculator("6*7")'

    trajectory = run(ReActAgent(tools=["calculator"]), model)
    assert trajectory.final_response == "42" and trajectory.tool_calls[0].tool_args == {"expression": "6*7"}


def test_a_model_that_fails_raises_and_is_recorded_as_failed() -> None:
    agent = ReActAgent(tools=["calculator"])
    broken = Scripted(asks(call("calculator", {"expression": "1"})), ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        run(agent, broken)
    trajectory = run(agent, Scripted(ConnectionError("gone")), raise_errors=False)
    assert (trajectory.status, trajectory.stop_reason) == (TrajectoryStatus.FAILED, StopReason.MODEL_ERROR)
    assert trajectory.failure is not None and trajectory.failure.kind == "ConnectionError"
    assert trajectory.final_response == ""


def test_a_cancelled_run_says_so_and_closes_its_tools() -> None:
    closed: list[str] = []

    class Held:
        name, description, parameters = "held", "Is open.", {"type": "object", "properties": {}}

        async def open(self, context: ToolContext) -> Any:
            return self

        async def call(self, arguments: dict[str, Any]) -> ToolResult:
            raise AssertionError

        async def close(self) -> None:
            closed.append("held")

    steps: list[Any] = []

    async def main() -> None:
        asked = asyncio.Event()

        async def silent(messages: Any, **_: Any) -> str:
            asked.set()
            await asyncio.Event().wait()
            return ""

        task = asyncio.create_task(ReActAgent(tools=[Held()]).run_trajectory("?", silent, on_step=steps.append))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert closed == ["held"]


def test_one_agent_serves_many_runs_at_a_time() -> None:
    agent = ReActAgent(tools=["calculator"])

    async def model(messages: list[dict[str, Any]], *, tools: Any = None, **_: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        question = messages[1]["content"]
        if messages[-1]["role"] == "tool":
            return {"content": f"{question} = {messages[-1]['content']}"}
        return asks(call("calculator", {"expression": question}))

    async def main() -> list[Trajectory]:
        return await asyncio.gather(*(agent.run_trajectory(f"{number} * 2", model) for number in range(50)))

    answers = [trajectory.final_response for trajectory in asyncio.run(main())]
    assert answers == [f"{number} * 2 = {2 * number}" for number in range(50)]


def test_rewards_of_tools_are_recorded() -> None:
    @tool
    def good() -> ToolResult:
        """Is rewarded."""
        return ToolResult("well done", reward=0.5)

    trajectory = run(ReActAgent(tools=[good]), Scripted(asks(call("good")), "ok"))
    assert trajectory.tool_reward == 0.5
    (step,) = [step for step in trajectory.steps if step.reward_score is not None]
    assert step.call == 0


def test_an_agent_of_ones_own() -> None:
    @register_agent("test_twice")
    class Twice(ReActAgent):
        def __init__(self, *, word: str = "really", **settings: Any) -> None:
            super().__init__(**settings)
            self.word = word

        async def answered(self, run: AgentRun, answer: str, call: int) -> None:
            if run.state.setdefault("asked", 0):
                await super().answered(run, answer, call)
            else:
                run.state["asked"] += 1
                self.tell(run, f"{self.word}?")

    model = Scripted("41", "42")
    trajectory = run(make_agent("test_twice", {"word": "honestly", "max_steps": 4}), model)
    assert trajectory.final_response == "42" and model.requests[1]["messages"][-1]["content"] == "honestly?"
    with pytest.raises(AgentSettingsError, match="did you mean 'word'"):
        make_agent("test_twice", {"wrod": "x"})
    with pytest.raises(AgentSettingsError, match="did you mean 'react'"):
        make_agent("raect")
    with pytest.raises(AgentSettingsError, match="already"):
        register_agent("react")(Twice)


def test_code_of_an_agent_that_raises() -> None:
    class Broken(ReActAgent):
        def parse(self, message: Any, run: AgentRun) -> Any:
            raise KeyError("oops")

    trajectory = run(Broken(), Scripted("x"), raise_errors=False)
    assert trajectory.stop_reason is StopReason.AGENT_ERROR and trajectory.status is TrajectoryStatus.FAILED


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 0},
        {"max_steps": 2.5},
        {"max_tokens": True},
        {"max_seconds": -1},
        {"format": "xml"},
        {"when_full": "panic"},
        {"context_tokens": 0},
        {"system_prompt": 5},
        {"name": ["x"]},
        {"sampling": 0.5},
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(AgentSettingsError, match=next(iter(settings))):
        ReActAgent(**settings)


@pytest.mark.parametrize("tools", ["calculator", None])
def test_tools_that_are_no_list(tools: Any) -> None:
    with pytest.raises(ToolSetupError, match="tools must be a list"):
        ReActAgent(tools=tools)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"question": "Why?"}, "Why?"),
        ({"problem_statement": "Repair it"}, "Repair it"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "Hi"),
        ([{"role": "system", "content": "Now."}, {"role": "user", "content": "Hi"}], "Hi"),
        ([{"role": "system", "content": [{"type": "text", "text": "Now."}]}, {"role": "user", "content": "Hi"}], "Hi"),
    ],
)
def test_prompts(prompt: Any, text: str) -> None:
    model = Scripted("ok")
    run(ReActAgent(system_prompt="Be brief."), model, prompt)
    assert model.requests[0]["messages"][-1]["content"] == text
    assert [message["role"] for message in model.requests[0]["messages"]] == ["system", "user"]
    assert model.requests[0]["messages"][0]["content"] in ("Be brief.", "Be brief.\n\nNow.")


@pytest.mark.parametrize("prompt", [{"answer": "42"}, [], 7, [{"content": "no role"}]])
def test_prompts_that_hold_no_task(prompt: Any) -> None:
    from ajet.schema.errors import TaskDataError

    with pytest.raises(TaskDataError):
        run(ReActAgent(), Scripted("ok"), prompt)


def test_standalone_use_loads_nothing_heavy() -> None:
    program = (
        "import asyncio, sys\nfrom ajet.agents import ReActAgent\n"
        "async def model(messages):\n    return 'Final Answer: 42'\n"
        "agent = ReActAgent(tools=['calculator'])\n"
        "assert asyncio.run(agent.run_trajectory('?', model)).final_response == '42'\n"
        "heavy = {'torch', 'transformers', 'ray', 'openai', 'datasets', 'starlette', 'ajet.config.root', "
        "'ajet.task_runner.tuner'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
