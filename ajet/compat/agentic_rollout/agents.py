"""The library's agents over ours: its way to set one up and to run it, and the forms in which its models call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ajet.agents import Agent, StepType, StopReason
from ajet.agents import CodingAgent as _CodingAgent
from ajet.agents import ReActAgent as _ReActAgent
from ajet.agents import ToolAgent as _ToolAgent
from ajet.agents.call_grammar import CallSyntaxError, read_value
from ajet.agents.model_function import AgentReply, Message, ToolCall
from ajet.agents.reply_format import ReplyFormat, TextFormat
from ajet.agents.run import AgentRun
from ajet.agents.tools import ToolContext, Toolset, make_tools
from ajet.compat.agentic_rollout.tools import as_tool, create_tools
from ajet.schema.trajectory import Trajectory as _Trajectory
from ajet.schema.trajectory import TrajectoryStep


class Trajectory(_Trajectory):
    """Our trajectory under the library's method names."""

    def add_step(self, step: TrajectoryStep) -> None:
        self.steps.append(step)

    def get_messages(self) -> list[Message]:
        return self.messages or [{"role": step.role, "content": step.content} for step in self.steps]

    def get_final_response(self) -> str:
        return self.final_response

    def get_tool_calls(self) -> list[TrajectoryStep]:
        return self.tool_calls

    def get_total_reward(self) -> float:
        return self.tool_reward

    @property
    def final_reward(self) -> float | None:
        return self.tool_reward if self.reward is None else self.reward

    @property
    def total_tokens(self) -> int:
        usage = self.usage
        return usage.input_tokens + usage.output_tokens


class _Former(Agent):
    """The library's way to set up and run an agent, over ours."""

    trajectory_class = Trajectory

    def __init__(
        self,
        max_steps: int = 10,
        max_tokens_per_step: int = 16000,
        temperature: float = 0.7,
        tools_config: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        sampling = {"max_tokens": max_tokens_per_step, "temperature": temperature}
        ours: dict[str, Any] = {"format": "text"}  # its functions return text, whatever else they take
        ours |= {key: config.pop(key) for key in ("system_prompt", "format", "name") if key in config}
        super().__init__(max_steps=max_steps, sampling=sampling, **ours)
        self.config = config
        self.max_steps, self.max_tokens_per_step, self.temperature = max_steps, max_tokens_per_step, temperature
        if tools_config:
            self.set_tools(create_tools(tools_config))

    def set_tools(self, tools: Mapping[str, Any]) -> None:
        """The tools; the key is the name that the model sees."""
        finish = [tool for tool in self.tools if getattr(tool, "name", "") == "finish" and "finish" not in tools]
        self.tools = [*(as_tool(tool, name) for name, tool in tools.items()), *finish]

    def set_interactions(self, interactions: Mapping[str, Any]) -> None:
        self.interactions = dict(interactions)

    async def run_trajectory(  # type: ignore[override]
        self, prompt: Any, llm_generate_func: Any = None, request_id: str = "", **more: Any
    ) -> Trajectory:
        model = more.pop("model", llm_generate_func)
        made = await super().run_trajectory(prompt, model, request_id=request_id, **more)
        assert isinstance(made, Trajectory)
        return made


class ReactAgent(_Former, _ReActAgent):
    """`ReActAgent`, in the text format unless `format` says otherwise."""


class _ToolCalls(TextFormat):
    """`TOOL_CALL: tool(key=value)`, besides what `TextFormat` reads. A reply without any of it is the answer."""

    def parse(self, message: Message, tools: Sequence[dict[str, Any]]) -> AgentReply:
        text = str(message.get("content") or "")
        found = super().parse({**message, "content": re.sub(r"^\s*TOOL_CALL:", "Action:", text, flags=re.M)}, tools)
        plain = not found.calls and found.answer is None and not re.search(r"^\s*(TOOL_CALL|Action)\b", text, re.M)
        return AgentReply(answer=text.strip()) if plain and text.strip() else found


class ToolAgent(_Former, _ToolAgent):
    """`ToolAgent`, which reads `TOOL_CALL: …` as well, runs all calls of a reply, and takes any other text as the
    answer."""

    one_call_per_step = False

    async def answered(self, run: AgentRun, answer: str, call: int) -> None:
        await Agent.answered(self, run, answer, call)

    def _reply_format(self, function: Any) -> ReplyFormat:
        return _ToolCalls() if self.format == "text" else super()._reply_format(function)


class CodingAgent(_Former, _CodingAgent):
    """`CodingAgent`; `run_trajectory(…, context=ToolContext(sandbox=…))` says where it works."""


GENERAL = """\
Work in steps. In each, write what you think, then one action as JSON, in exactly this form:

Thought: what you know, and what to do next
Action: {"name": "the tool", "parameters": {…}}

The tools, each with the JSON schema of its parameters:
"""


class _JsonActions(TextFormat):
    """`Thought: …`, `Action: {"name": …, "parameters": {…}}`. What `TextFormat` reads is read, too."""

    expected = 'Write "Thought: …", then "Action: " and one JSON object with "name" and "parameters".'

    def introduction(self, tools: Sequence[dict[str, Any]]) -> str:
        functions = [tool["function"] for tool in tools]
        lines = [f"- {each['name']}: {each['description']}\n  {json.dumps(each['parameters'])}" for each in functions]
        return GENERAL + "\n".join(lines)

    def action(self, body: str, given: str | None, tools: Sequence[dict[str, Any]], index: int) -> ToolCall | str:
        bare = body.removeprefix("```json").removeprefix("```").strip()
        if not bare.startswith("{"):
            return super().action(body, given, tools, index)
        try:
            value, _ = read_value(bare)
        except CallSyntaxError as error:
            return f"The action could not be read: {error}"
        name = value.get("name", value.get("tool_name"))
        if not isinstance(name, str):
            return 'The action says no "name": the name of a tool'
        parameters = value.get("parameters", value.get("tool_args", {}))
        asked = parameters if isinstance(parameters, dict) else json.dumps(parameters)
        return ToolCall(name, asked, f"call_{index}")


class GeneralAgent(_Former):
    """One JSON action in each round, until a tool of `termination_tool_names` was called. The number of rounds left is
    part of the prompt, and so of the record."""

    def __init__(
        self,
        system_prompt: str | None = None,
        tool_names: Sequence[str] = (),
        max_rounds: int = 10,
        termination_tool_names: Sequence[str] = ("finish",),
        debug: bool = False,
        action_parser: Any = None,
        steps_remaining_template: str = "\n\nSteps Remaining: {steps}",
        show_steps_remaining: bool = True,
        profiler: Any = None,
        **config: Any,
    ) -> None:
        """`max_steps`, if it is given, stands for `max_rounds`. `tool_names`, `debug` and `profiler` have no effect."""
        rounds = config.pop("max_steps", None) or max_rounds
        self._ends = frozenset(termination_tool_names)
        super().__init__(max_steps=rounds, system_prompt=system_prompt, **config)
        if "finish" in self._ends and not any(getattr(tool, "name", "") == "finish" for tool in self.tools):
            self.tools += make_tools(["finish"])
        self.action_parser = action_parser
        self._countdown = steps_remaining_template if show_steps_remaining else ""

    def _reply_format(self, function: Any) -> ReplyFormat:
        return _JsonActions()

    async def begin(self, run: AgentRun, messages: Sequence[Message]) -> None:
        await super().begin(run, messages)
        self._say_what_is_left(run)

    async def step(self, run: AgentRun) -> None:
        await super().step(run)
        self._say_what_is_left(run)

    def _say_what_is_left(self, run: AgentRun) -> None:
        if self._countdown and run.trajectory.stop_reason is None and run.messages:
            left = self._countdown.format(steps=self.limits.max_steps - run.model_steps)
            content = run.messages[-1].get("content") or ""
            said = [*content, {"type": "text", "text": left}] if isinstance(content, list) else f"{content}{left}"
            run.messages[-1] = {**run.messages[-1], "content": said}

    def parse(self, message: Message, run: AgentRun) -> AgentReply:
        """Parse by `action_parser`, if there is one. It returns `tool_name`, `tool_args` and `thought_content`, a step,
        or a list of either."""
        if self.action_parser is None:
            return super().parse(message, run)
        found = self.action_parser(str(message.get("content") or ""))
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for each in found if isinstance(found, list) else [found]:
            facts = each if isinstance(each, Mapping) else _step_fields(each)
            if facts.get("thought_content"):
                thoughts.append(str(facts["thought_content"]))
            if facts.get("step_type") is StepType.FINAL_ANSWER:
                return AgentReply("\n".join(thoughts), answer=str(facts.get("content") or ""))
            if facts.get("tool_name"):
                calls.append(
                    ToolCall(str(facts["tool_name"]), dict(facts.get("tool_args") or {}), f"call_{len(calls)}")
                )
        problem = "" if calls else "The reply holds no action."
        return AgentReply("\n".join(thoughts), tuple(calls), problem=problem)

    async def execute_tool_call(self, tool_call: ToolCall, run: AgentRun) -> TrajectoryStep:
        step = await super().execute_tool_call(tool_call, run)
        if tool_call.name in self._ends and step.success:
            step.metadata["ends_episode"] = True
        return step


def _step_fields(step: Any) -> dict[str, Any]:
    """A step's fields that an action has."""
    return {name: getattr(step, name, None) for name in ("step_type", "content", "tool_name", "tool_args")}


class BaseAgent(_Former):
    """For agents that define `run_trajectory` themselves, with the helpers that it may call."""

    def format_messages_for_llm(self, trajectory: Trajectory, additional_message: str | None = None) -> list[Message]:
        messages: list[Message] = [{"role": "system", "content": self.create_system_prompt()}]
        messages += [{"role": step.role, "content": step.content} for step in trajectory.steps]
        return [*messages, *([{"role": "user", "content": additional_message}] if additional_message else [])]

    def parse_llm_output(self, output: str, step_type: StepType = StepType.THOUGHT) -> TrajectoryStep:
        return TrajectoryStep(step_type, output.strip())

    def should_continue(self, trajectory: Any) -> bool:
        if not isinstance(trajectory, _Trajectory):
            return super().should_continue(trajectory)
        answered = bool(trajectory.steps) and trajectory.steps[-1].step_type is StepType.FINAL_ANSWER
        return not answered and trajectory.stop_reason is None and len(trajectory.steps) < self.limits.max_steps

    async def execute_tool_call(self, name: Any, args: Any, trajectory: Any = None) -> TrajectoryStep:
        if trajectory is None:  # from our own loop: a ToolCall and the run
            return await super().execute_tool_call(name, args)
        async with Toolset(self.tools, ToolContext(episode_id=trajectory.request_id)) as toolset:
            result = await toolset.call(name, args)
        step = TrajectoryStep(StepType.ACTION_RESULT, f"Execution output of [{name}]:\n{result.output}")
        step.tool_name, step.tool_args, step.tool_result = name, args, result.data
        step.success, step.reward_score = result.success, result.reward
        step.metadata = {"tool_name": name, "tool_args": args, "execution_successful": result.success}
        return step

    def finalize_trajectory(self, trajectory: Trajectory) -> None:
        trajectory.end(StopReason.AGENT)
