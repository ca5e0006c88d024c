"""Programs of the shape that the agentic-rollout library's examples have, with only their import changed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ajet.agents import StopReason, read_trajectory
from ajet.agents.tools import ToolContext, ToolSetupError
from ajet.compat.agentic_rollout import (
    AgenticRollout,
    AgenticRolloutConfig,
    BaseAgent,
    BaseAgenticTool,
    BashExecutorTool,
    CalculatorTool,
    CodingAgent,
    GeneralAgent,
    ReactAgent,
    SimpleAgenticTool,
    StepType,
    ToolAgent,
    ToolCallInfo,
    ToolRegistry,
    ToolResult,
    Trajectory,
    TrajectoryStep,
    create_agentic_rollout,
    create_llm_client,
    create_openai_tool_schema,
    create_tool,
    create_tools,
    dump_trajectory,
    get_agent_class,
    get_global_tool_registry,
    list_agents,
    register_agent,
    register_tool,
    save_trajectory_as_messages,
)
from ajet.environment.sandboxes import SandboxSettings, open_sandbox
from support.http_server import Server
from support.scripted_helper import reply

pytestmark = pytest.mark.anyio


class Scripted:
    """A language model of the library's kind: keyword sampling in, text out."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.sampling: dict[str, Any] = {}

    async def __call__(self, messages: list[dict[str, str]], max_tokens: int = 0, temperature: float = 0.0) -> str:
        self.sampling = {"max_tokens": max_tokens, "temperature": temperature}
        return self.replies.pop(0)


def results(trajectory: Trajectory) -> list[TrajectoryStep]:
    return [step for step in trajectory.steps if step.step_type is StepType.ACTION_RESULT]


class DoubleTool(SimpleAgenticTool):
    """Doubles a number, and remembers it."""

    def __init__(self) -> None:
        number = {"number": {"type": "number", "description": "Any number."}}
        super().__init__("double", "Doubles a number.", number, ["number"])
        self.stored: list[float] = []

    async def simple_execute(self, parameters: dict[str, Any]) -> Any:
        self.stored.append(parameters["number"] * 2)
        return {"doubled": parameters["number"] * 2}


async def test_a_react_agent_with_a_calculator() -> None:
    config = AgenticRolloutConfig(agent_type="react", max_steps=5, max_tokens_per_step=512, temperature=0.1)
    model = Scripted(
        'Thought: I add.\nAction: calculator(expression="2 + 2")', "Action: Final Answer: The result of 2+2 is 4."
    )
    rollout = AgenticRollout(config, model)
    rollout.agent.set_tools({"calculator": create_tool("Calculator")})
    run = rollout.agent.run_trajectory(prompt="What is 2+2?", llm_generate_func=model, request_id="one")
    trajectory = await run
    assert trajectory.get_final_response() == "The result of 2+2 is 4."
    assert trajectory.is_completed and trajectory.request_id == "one" and trajectory.total_tokens > 0
    (call,) = trajectory.get_tool_calls()
    assert (call.tool_name, call.tool_args) == ("calculator", {"expression": "2 + 2"})
    assert model.sampling == {"max_tokens": 512, "temperature": 0.1}


async def test_a_custom_agent() -> None:
    @register_agent("compat_shout")
    class ShoutAgent(BaseAgent):
        async def run_trajectory(self, prompt: Any, llm_generate_func: Any, request_id: str, **_: Any) -> Trajectory:
            trajectory = Trajectory(request_id)
            trajectory.add_step(TrajectoryStep(StepType.OBSERVATION, prompt))
            while self.should_continue(trajectory):
                output = await llm_generate_func(self.format_messages_for_llm(trajectory, "Think."))
                trajectory.add_step(self.parse_llm_output(output))
                trajectory.add_step(await self.execute_tool_call("double", {"number": 60}, trajectory))
                trajectory.add_step(self.parse_llm_output(output.upper(), StepType.FINAL_ANSWER))
            self.finalize_trajectory(trajectory)
            return trajectory

        def create_system_prompt(self) -> str:
            return "Shout."

    seen: list[Any] = []

    async def model(messages: list[dict[str, str]], **_: Any) -> str:
        seen.extend(messages)
        return " hello "

    agent = get_agent_class("compat_shout")(max_steps=8)
    tool = DoubleTool()
    agent.set_tools({"double": tool})
    trajectory = await agent.run_trajectory("Say hello.", model, "two")
    assert trajectory.get_final_response() == "HELLO" and trajectory.is_completed and tool.stored == [120]
    assert [message["content"] for message in seen] == ["Shout.", "Say hello.", "Think."]
    result = trajectory.steps[2]
    assert result.content.startswith("Execution output of [double]:\n") and result.metadata["execution_successful"]
    assert trajectory.get_messages()[0] == {"role": "user", "content": "Say hello."}


async def test_prompts_are_run_in_their_order_and_one_failure_stops_no_other() -> None:
    async def model(messages: list[dict[str, str]], **_: Any) -> str:
        question = messages[-1]["content"]
        if question == "second":
            raise RuntimeError("busy")
        await asyncio.sleep(0)
        return f"Final Answer: {question}!"

    rollout = create_agentic_rollout({"agent_type": "react", "concurrent_requests": 2}, llm_generate_func=model)
    third = {"messages": [{"role": "user", "content": "third"}]}
    done = await rollout.run_batch(["first", {"question": "second"}, third])
    assert [trajectory.get_final_response() for trajectory in done] == ["first!", "", "third!"]
    assert done[1].failure is not None and done[1].failure.message == "busy"
    with pytest.raises(ValueError, match="unknown agent"):
        AgenticRollout(AgenticRolloutConfig(agent_type="dreamer"))


async def test_an_agent_of_ones_own_that_raises_fails_alone_and_all_are_saved(tmp_path: Path) -> None:
    @register_agent("compat_picky")
    class PickyAgent(BaseAgent):
        async def run_trajectory(self, prompt: Any, llm_generate_func: Any, request_id: str, **_: Any) -> Trajectory:
            trajectory = Trajectory(request_id)
            trajectory.add_step(TrajectoryStep(StepType.FINAL_ANSWER, prompt["question"].upper()))
            self.finalize_trajectory(trajectory)
            return trajectory

    config = AgenticRolloutConfig("compat_picky", save_trajectories=True, trajectory_save_path=str(tmp_path))
    rollout = AgenticRollout(config, Scripted())
    done = await rollout.run_batch([{"question": "first"}, {"query": "second"}, {"question": "third"}])
    assert [trajectory.get_final_response() for trajectory in done] == ["FIRST", "", "THIRD"]
    assert done[1].stop_reason is StopReason.AGENT_ERROR and done[1].failure is not None
    assert done[1].failure.kind == "KeyError"
    saved = {read_trajectory(path).request_id for path in tmp_path.glob("*.jsonl")}
    assert saved == {trajectory.request_id for trajectory in done} and len(saved) == 3


async def test_a_prompt_without_any_text_fails_alone() -> None:
    rollout = AgenticRollout(AgenticRolloutConfig(), Scripted("Final Answer: 42"))
    done = await rollout.run_batch([{"answer": "no question"}, "What is 6*7?"])
    assert [trajectory.get_final_response() for trajectory in done] == ["", "42"]
    assert "holds none of" in str(done[0].failure)


@pytest.mark.parametrize("place", [None, "out/trajectories.jsonl"])
def test_saving_needs_a_folder(place: str | None) -> None:
    with pytest.raises(ValueError, match="trajectory_save_path"):
        AgenticRollout(AgenticRolloutConfig(save_trajectories=True, trajectory_save_path=place))


async def test_tools_of_the_librarys_kinds() -> None:
    class Result:
        success, result, error, reward_score = False, None, "no such city", 0.0

    class Weather:
        """The weather somewhere."""

        def get_openai_tool_schema(self) -> dict[str, Any]:
            return create_openai_tool_schema("weather", "The weather.", {"city": {"type": "string"}}, ["city"])

        async def execute_tool(self, instance_id: str, parameters: dict[str, Any]) -> Any:
            return Result()

    class Legacy:
        """Adds two numbers."""

        def execute(self, a: int, b: int) -> int:
            return a + b

    def shout(text: str) -> str:
        """Writes it large."""
        return text.upper()

    agent = ReactAgent(max_steps=6)
    agent.set_tools({"weather": Weather(), "add": Legacy(), "shout": shout, **create_tools({"calculator": None})})
    model = Scripted(
        'Action: weather(city="Nowhere")\nAction: add(a=2, b=3)\n'
        'Action: shout(text="a, (b)")\nAction: calculator("10/4")',
        "Final Answer: done",
    )
    trajectory = await agent.run_trajectory("?", model)
    found = results(trajectory)
    assert [step.content for step in found] == ["no such city", "5", "A, (B)", "2.5"]
    assert [step.success for step in found] == [False, True, True, True]
    assert isinstance(await DoubleTool().execute_tool("id", {"number": 1}), ToolResult)


async def test_a_tool_agent_keeps_its_finish() -> None:
    agent = ToolAgent()
    agent.set_tools({"double": DoubleTool()})
    model = Scripted("Action: double(number=2)", 'Action: finish(answer="4")')
    assert (await agent.run_trajectory("?", model)).get_final_response() == "4"
    assert {"react", "tool", "coding"} <= set(list_agents()) and get_agent_class("nothing") is None


async def test_trajectories_are_written(tmp_path: Path) -> None:
    trajectory = await ReactAgent().run_trajectory("Hi", Scripted("Final Answer: Hello"))
    for kind in ("json", "jsonl", "txt"):
        dump_trajectory(trajectory, tmp_path / f"t.{kind}", kind)
    assert Trajectory.from_dict(json.loads((tmp_path / "t.json").read_text())) == trajectory
    assert "[final_answer] Hello" in (tmp_path / "t.txt").read_text()
    save_trajectory_as_messages(trajectory, tmp_path / "m.jsonl", include_system_prompt=False)
    roles = [json.loads(line)["role"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert roles == ["meta", "user", "assistant"]
    with pytest.raises(ValueError, match="choose json"):
        dump_trajectory(trajectory, tmp_path / "t.xml", "xml")


async def test_a_general_agent() -> None:
    seen: list[list[dict[str, Any]]] = []
    replies = iter(
        [
            '<think>Action: {"name": "finish", "parameters": {"answer": "41"}}</think>\nThought: I multiply.\n'
            'Action: {"name": "calculator", "parameters": {"expression": "6*7"}}',
            'Action: {"parameters": {}}',
            'Action:\n```json\n{"tool_name": "finish", "tool_args": {"answer": "42"}}\n```',
        ]
    )

    async def model(messages: list[dict[str, Any]], **_: Any) -> str:
        seen.append(messages)
        return next(replies)

    rollout = AgenticRollout(AgenticRolloutConfig(agent_type="general", max_steps=5), model)
    rollout.agent.set_tools({"calculator": create_tool("Calculator")})
    made = await rollout.agent.run_trajectory("What is 6*7?", model, "1")
    assert (made.get_final_response(), made.stop_reason) == ("42", StopReason.TOOL)
    assert [step.tool_name for step in made.get_tool_calls()] == ["calculator", "finish"]
    assert seen[0][-1]["content"] == "What is 6*7?\n\nSteps Remaining: 5"
    assert seen[1][-1]["content"].endswith("42\n\nSteps Remaining: 4")
    assert 'says no "name"' in seen[2][-1]["content"]
    assert seen[2][: len(seen[1])] == seen[1]  # what the model saw is what is recorded
    replies = iter(['Action: {"name": "finish", "parameters": {"answer": "42"}}'])
    parts = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    await rollout.agent.run_trajectory([{"role": "user", "content": parts}], model, "2")
    assert seen[-1][-1]["content"] == [*parts, {"type": "text", "text": "\n\nSteps Remaining: 5"}]


async def test_a_general_agent_with_a_parser_and_an_end_of_its_own() -> None:
    def parse(text: str) -> Any:
        name, _, value = text.partition(" ")
        return {"thought_content": "hm", "tool_name": name, "tool_args": {"text": value}}

    def say(text: str) -> str:
        """Say it."""
        return text.upper()

    agent = GeneralAgent(
        system_prompt="Shout.",
        action_parser=parse,
        termination_tool_names=["say"],
        show_steps_remaining=False,
        max_rounds=3,
    )
    agent.set_tools({"say": say})
    made = await agent.run_trajectory("?", lambda messages: "say hello")
    assert made.stop_reason is StopReason.TOOL and made.steps[-2].content.endswith("HELLO")
    endless = GeneralAgent(max_rounds=2, action_parser=lambda text: [])
    assert (await endless.run_trajectory("?", lambda messages: "x")).stop_reason is StopReason.MAX_STEPS


async def test_a_client_of_a_server() -> None:
    server = Server(lambda path, body, key: reply("four"))
    client = create_llm_client("key", server.url, "m")
    assert await client.generate([{"role": "user", "content": "2+2?"}], max_tokens=8) == "four"
    await client.close()
    ((_, body, key),) = server.seen
    assert (body["max_tokens"], body["temperature"], key) == (8, 0.7, "key")


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", StopReason.REPLY_CUT), ("content_filter", StopReason.REFUSED)]
)
async def test_a_clients_reply_that_is_no_answer(finish: str, reason: StopReason) -> None:
    server = Server(lambda path, body, key: reply("Final Answer: 4", finish))
    client = create_llm_client("key", server.url, "m")
    (made,) = await AgenticRollout(AgenticRolloutConfig(), client.generate).run_batch(["6*7?"])
    await client.close()
    assert made.stop_reason is reason


async def test_tools_without_an_agent() -> None:
    calculator = create_tool("Calculator", {"precision": 10, "debug": True})
    made = await calculator.create_instance()
    for asked, value in (
        ({"expression": "2 * 7"}, 14),
        ({"operation": "power", "base": 2, "exponent": 8}, 256),
        ({"operation": "factorial", "n": 5}, 120),
        ({"operation": "log", "number": 8, "base": 2}, 3),
        ({"operation": "sin", "angle": 90, "unit": "degrees"}, 1),
        ({"operation": "multiply", "numbers": [4, 7]}, 28),
        ({"operation": "average", "numbers": [2, 3, 4]}, 3),
        ({"a": 1, "b": 2}, 3),
    ):
        answer = await calculator.execute_tool(made, asked)
        assert answer.success and answer.result["result"] == value, answer
    wrong = await calculator.execute_tool(made, {"expression": "1/0"})
    assert not wrong.success and "division by zero" in (wrong.error or "")
    await calculator.release_instance(made)
    with pytest.raises(ValueError, match="no instance"):
        await calculator.execute_tool(made, {"expression": "1"})


async def test_a_registry_of_tools() -> None:
    class Counter(BaseAgenticTool):
        def get_openai_tool_schema(self) -> dict[str, Any]:
            return create_openai_tool_schema("count", "Counts.", {"by": {"type": "integer"}}, ["by"])

        async def execute_tool(self, instance_id: str, parameters: dict[str, Any], **more: Any) -> ToolResult:
            if parameters["by"] < 0:
                raise RuntimeError("backwards")
            return ToolResult(success=True, result=parameters["by"], reward_score=0.5)

    registry = ToolRegistry()
    registry.register_tool(Counter, {})
    registry.register_tool_instance(DoubleTool())
    registry.register_tool_instance(create_tool("calculator"))
    assert registry.get_tool_names() == ["count", "double", "calculator"] and registry.has_tool("double")
    made = await registry.create_tool_instance("calculator")
    assert registry.get_tool_info("calculator")["active_instances"] == 1
    call = ToolCallInfo("calculator", made, {"expression": "5 * 5"})
    assert (await registry.execute_tool_call(call)).result["result"] == 25
    other = await registry.create_tool_instance("count")
    assert (await registry.execute_tool("count", other, {"by": 2})).reward_score == 0.5
    assert not (await registry.execute_tool("count", other, {})).success
    assert "backwards" in ((await registry.execute_tool("count", other, {"by": -1})).error or "")
    with pytest.raises(ValueError, match="no instance"):
        await registry.execute_tool("count", made, {"by": 1})
    with pytest.raises(ValueError, match="there is no tool"):
        await registry.create_tool_instance("nothing")
    await registry.release_all_instances()
    assert registry.get_tool_info("calculator")["active_instances"] == 0


async def test_instances_of_a_run() -> None:
    class Diary(BaseAgenticTool):
        """Writes a diary."""

        def __init__(self) -> None:
            super().__init__(tool_schema=create_openai_tool_schema("note", "Note.", {"text": {"type": "string"}}))
            self.seen: list[tuple[str, str]] = []

        async def execute_tool(self, instance_id: str, parameters: dict[str, Any], **more: Any) -> ToolResult:
            assert instance_id in self.instances
            self.seen.append((instance_id, parameters["text"]))
            return ToolResult(result="noted")

    diary, agent = Diary(), ReactAgent()
    agent.set_tools({"note": diary, "calc": create_tool("Calculator")})
    model = Scripted('Action: note(text="a")\nAction: note(text="b")\nAction: calc("1+1")', "Final Answer: done")
    trajectory = await agent.run_trajectory("?", model)
    assert [step.success for step in results(trajectory)] == [True] * 3
    assert len({made for made, _ in diary.seen}) == 1 and not diary.instances, "one instance, released at the end"


async def test_an_agent_that_calls_the_model_itself() -> None:
    class Own(BaseAgent):
        async def run_trajectory(
            self, prompt: Any, llm_generate_func: Any = None, request_id: str = "", **_: Any
        ) -> Any:
            trajectory = Trajectory(request_id=request_id)
            trajectory.add_step(TrajectoryStep(step_type=StepType.OBSERVATION, content=prompt))
            said = await llm_generate_func(
                self.format_messages_for_llm(trajectory),
                max_tokens=self.max_tokens_per_step,
                temperature=self.temperature,
            )
            trajectory.add_step(TrajectoryStep(step_type=StepType.FINAL_ANSWER, content=said))
            self.finalize_trajectory(trajectory)
            return trajectory

    model = Scripted("42")
    trajectory = await Own(max_tokens_per_step=9, temperature=0.1).run_trajectory("?", model, "r")
    assert trajectory.get_final_response() == "42" and model.sampling == {"max_tokens": 9, "temperature": 0.1}


async def test_the_coding_agent_by_name() -> None:
    rollout = AgenticRollout(AgenticRolloutConfig(agent_type="coding", max_steps=4), Scripted("Final Answer: x"))
    assert isinstance(rollout.agent, CodingAgent)
    with pytest.raises(ToolSetupError, match="needs a sandbox"):
        await rollout.agent.run_trajectory("?", Scripted("Final Answer: x"), "r")


@pytest.mark.parametrize(
    "call",
    [
        "TOOL_CALL: calculator(expression=5+3)",
        "I add.\nTOOL_CALL: calculator(expression=5+3)",
        "Action: calculator(5+3)",
        "Action: calculator\nAction Input: 5+3",
        "Thought: I add.\nAction: calculator Action Input: 5+3",
        "TOOL_CALL: calculator(expression='5+3')\nTOOL_CALL: calculator(expression=(5+3)*1)",
    ],
)
async def test_arguments_without_quotes(call: str) -> None:
    model = Scripted(call, "The result is 8, more or less")
    rollout = AgenticRollout(AgenticRolloutConfig(agent_type="tool", tools_config={"calculator": {}}), model)
    (made,) = await rollout.run_batch(["5+3?"])
    assert [step.tool_result for step in results(made)] == [8] * call.count("calculator")
    assert made.get_final_response() == "The result is 8, more or less"


async def test_the_answer_as_an_argument_without_quotes() -> None:
    model = Scripted("TOOL_CALL: finish(answer=It is 8 (eight), more or less)")
    (made,) = await AgenticRollout({"agent_type": "tool"}, model).run_batch(["5+3?"])
    assert made.get_final_response() == "It is 8 (eight), more or less"


async def test_the_coding_agent_works_in_a_sandbox_of_each_prompt() -> None:
    model = Scripted(
        'Thought: I write it.\nAction: bash_executor(command="echo 5 > x; cat x; ls missing")',
        "Thought: done\nFinal Answer: written",
        'Thought: Is it there?\nAction: bash_executor(command="ls")',
        "Thought: done\nFinal Answer: it is not",
    )
    config = AgenticRolloutConfig(agent_type="coding", tools_config={"BashExecutor": {}}, concurrent_requests=1)
    first, second = await AgenticRollout(config, model, sandbox="bubblewrap").run_batch(["a", "b"])
    (step,) = results(first)
    assert (step.tool_name, step.tool_result["stdout"], step.tool_result["exit_code"]) == ("bash_executor", "5\n", 2)
    assert "missing" in step.tool_result["stderr"] and not step.success
    assert results(second)[0].tool_result["stdout"] == "" and first.get_final_response() == "written"


async def test_what_a_failed_command_printed_is_kept() -> None:
    registry = ToolRegistry()
    registry.register_tool_instance(create_tools({"BashExecutor": {}})["bash_executor"])
    async with open_sandbox(SandboxSettings()) as sandbox:
        made = await registry.create_tool_instance("bash_executor", context=ToolContext(sandbox))
        done = await registry.execute_tool("bash_executor", made, {"command": "echo out; echo err >&2; exit 3"})
        await registry.release_all_instances()
    done = done
    assert not done.success and done.error is not None and "exit code 3" in done.error
    assert (done.result["stdout"], done.result["stderr"], done.result["exit_code"]) == ("out\n", "err\n", 3)


def test_a_name_that_is_taken_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="there is an agent 'react' already"):
        register_agent("react")(ReactAgent)
    with pytest.raises(ValueError, match="there is a tool 'bash' already"):
        register_tool(DoubleTool(), name="bash")


def test_tools_are_created_under_the_names_that_the_librarys_models_saw() -> None:
    made = create_tools({"Calculator": {}, "Search": {}, "Finish": None, "FileEditor": {}, "BashExecutor": {}})
    assert list(made) == [tool.name for tool in made.values()]
    assert list(made) == ["calculator", "search", "finish", "file_editor", "bash_executor"]


def test_the_librarys_tools_by_their_classes() -> None:
    register_tool(CalculatorTool, {"debug": True})
    register_tool(BashExecutorTool, {"timeout": 30})
    register_tool(CalculatorTool, {"debug": False}, "calc")
    registry = get_global_tool_registry()
    try:
        assert {"calculator", "bash_executor", "calc"} <= set(registry)
        assert (
            isinstance(CalculatorTool(), BaseAgenticTool) and BashExecutorTool({"timeout": 3}).name == "bash_executor"
        )
        with pytest.raises(ToolSetupError, match="no option 'wibble'"):
            register_tool(BashExecutorTool, {"wibble": 1}, "other")
    finally:
        registry.unregister("bash_executor")
        registry.unregister("calc")


@pytest.mark.parametrize(
    ("name", "take"),
    [
        ("SweAgent", "CodingAgent"),
        ("R2ESubmitTool", "in a sandbox"),
        ("PromptBuilder", "text"),
        ("Nothing", "cannot"),
    ],
)
def test_what_is_not_offered_says_what_to_take(name: str, take: str) -> None:
    with pytest.raises(ImportError, match=take):
        exec(f"from ajet.compat.agentic_rollout import {name}")  # noqa: S102 - as a program has it
