"""For programs written for the agentic-rollout library (package `workers`): its names, bound to our parts.

    from ajet.compat.agentic_rollout import AgenticRollout, AgenticRolloutConfig, BaseAgent, ReactAgent, …

What differs on purpose: replies are read by a grammar, several actions in one reply are run, arguments are validated,
a model that fails raises, and `max_steps` counts model calls. Names whose functions were never wired have no
counterpart here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet.agents import Agent, StepType, StopReason, as_model_function, register_agent
from ajet.agents import CodingAgent as _CodingAgent
from ajet.agents import ReActAgent as _ReActAgent
from ajet.agents import ToolAgent as _ToolAgent
from ajet.agents.call_grammar import CallSyntaxError, read_value
from ajet.agents.model_function import AgentReply, Message, ToolCall
from ajet.agents.ready import agent_class, agent_names
from ajet.agents.reply_format import ReplyFormat, TextFormat
from ajet.agents.run import AgentRun
from ajet.agents.tools import ToolContext, Toolset, get_global_tool_registry, make_tools, register_tool
from ajet.compat.agentic_rollout.batch import LLMAPIClient, create_llm_client, new_request_ids
from ajet.compat.agentic_rollout.tools import (
    BaseAgenticTool,
    SimpleAgenticTool,
    ToolCallInfo,
    ToolRegistry,
    ToolResult,
    as_tool,
    create_openai_tool_schema,
    create_tool,
    create_tools,
)
from ajet.schema.episode import Failure
from ajet.schema.trajectory import SUFFIX, TrajectoryStep, file_name, write_trajectory
from ajet.schema.trajectory import Trajectory as _Trajectory

__all__ = [
    "AgenticRollout",
    "AgenticRolloutConfig",
    "BaseAgent",
    "BaseAgenticTool",
    "CodingAgent",
    "GeneralAgent",
    "LLMAPIClient",
    "ReactAgent",
    "SimpleAgenticTool",
    "StepType",
    "ToolAgent",
    "ToolCallInfo",
    "ToolRegistry",
    "ToolResult",
    "Trajectory",
    "TrajectoryStep",
    "create_agentic_rollout",
    "create_llm_client",
    "create_openai_tool_schema",
    "create_tool",
    "create_tools",
    "dump_trajectory",
    "get_agent_class",
    "get_global_tool_registry",
    "list_agents",
    "register_agent",
    "register_tool",
    "save_trajectory_as_messages",
]


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


class ToolAgent(_Former, _ToolAgent):
    """`ToolAgent`."""


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
            last = run.messages[-1]
            run.messages[-1] = {**last, "content": f"{last.get('content') or ''}{left}"}

    def parse(self, message: Message, run: AgentRun) -> AgentReply:
        """By `action_parser`, if there is one: it returns `tool_name`, `tool_args` and `thought_content`, a step, or a
        list of either."""
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


@dataclass
class AgenticRolloutConfig:
    """What `AgenticRollout` is set up with."""

    agent_type: str = "react"
    max_steps: int = 10
    max_tokens_per_step: int = 16000
    temperature: float = 0.7
    tools_config: Mapping[str, Any] | None = None
    concurrent_requests: int = 4
    include_trajectory_in_output: bool = True
    save_trajectories: bool = False
    trajectory_save_path: str | None = None


class AgenticRollout:
    """One agent over many prompts."""

    def __init__(
        self,
        config: AgenticRolloutConfig | Mapping[str, Any],
        llm_generate_func: Any = None,
        tokenizer: Any = None,
        **more: Any,
    ) -> None:
        self.config = config if isinstance(config, AgenticRolloutConfig) else AgenticRolloutConfig(**config)
        self.llm_generate_func = llm_generate_func
        self.tokenizer = tokenizer
        place = self.config.trajectory_save_path
        if self.config.save_trajectories and (place is None or place.endswith(SUFFIX)):
            raise ValueError(f"save_trajectories needs trajectory_save_path, a folder for one file each, not {place!r}")
        made_of = get_agent_class(self.config.agent_type)
        if made_of is None:
            raise ValueError(f"unknown agent {self.config.agent_type!r}; there are: {', '.join(list_agents())}")
        self.agent: Any = made_of(
            max_steps=self.config.max_steps,
            max_tokens_per_step=self.config.max_tokens_per_step,
            temperature=self.config.temperature,
            tools_config=self.config.tools_config,
            **more,
        )
        self.trajectories: list[Trajectory] = []

    async def run_batch(self, prompts: Sequence[Any]) -> list[Trajectory]:
        """A trajectory for each prompt, in their order. One that fails says so and does not stop the others."""
        free = asyncio.Semaphore(self.config.concurrent_requests)

        async def one(prompt: Any, request_id: str) -> Trajectory:
            async with free:
                return await self.run_one(prompt, request_id)

        names = new_request_ids(len(prompts))
        self.trajectories = list(await asyncio.gather(*map(one, prompts, names)))
        return self.trajectories

    async def run_one(self, prompt: Any, request_id: str, model: Any = None) -> Trajectory:
        """One prompt's trajectory, by `model` or the rollout's own. A failure is part of it, not raised."""
        model = as_model_function(self.llm_generate_func if model is None else model)
        save_to = self.config.trajectory_save_path if self.config.save_trajectories else None
        try:
            made: Trajectory = await self.agent.run_trajectory(
                prompt, model, request_id, raise_errors=False, save_to=save_to
            )
        except Exception as error:  # noqa: BLE001 - an agent of the user's own may know no `raise_errors`
            made = Trajectory(request_id, agent=self.agent.name)
            made.end(StopReason.AGENT_ERROR, Failure(type(error).__name__, str(error)))
        if save_to is not None and not (file := Path(save_to) / file_name(request_id)).exists():
            write_trajectory(file, made)  # nor `save_to`
        return made

    async def generate_sequences(self, prompts: Any) -> Any:
        """A `DataProto` for verl's `DataProto` of prompts. With verl's client of its rollout servers as
        `llm_generate_func`, and a `tokenizer`, its tensors are exactly what was sampled; with a function of text, there
        are no tensors."""
        from ajet.compat.agentic_rollout.batch import generate_sequences

        return await generate_sequences(self, prompts)


def create_agentic_rollout(config: Mapping[str, Any], **more: Any) -> AgenticRollout:
    """`AgenticRollout(AgenticRolloutConfig(**config), …)`."""
    return AgenticRollout(config, **more)


_OWN: dict[str, type[Agent]] = {"react": ReactAgent, "tool": ToolAgent, "coding": CodingAgent, "general": GeneralAgent}


def get_agent_class(name: str) -> Any:
    """The class of a name; None if there is none."""
    found: type[Agent] | None = _OWN.get(name.lower())
    if found is None and name in agent_names():
        found = agent_class(name)
    return found


def list_agents() -> list[str]:
    return [*agent_names(), "general"]


def dump_trajectory(trajectory: _Trajectory, path: str | Path, format: str = "json") -> None:
    """Write a trajectory as `json`, `jsonl` (as `ajet view` reads it) or `txt`."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if format == "jsonl":
        write_trajectory(file, trajectory)
    elif format == "json":
        file.write_text(json.dumps(trajectory.to_dict(), ensure_ascii=False, indent=2), "utf-8", "replace")
    elif format == "txt":
        lines = [f"[{step.step_type}] {step.content}" for step in trajectory.steps]
        file.write_text("\n\n".join(lines) + "\n", "utf-8", "replace")
    else:
        raise ValueError(f"format {format!r}: choose json, jsonl or txt")


def save_trajectory_as_messages(
    trajectory: _Trajectory, path: str | Path, include_system_prompt: bool = True, include_meta: bool = True
) -> None:
    """Write the conversation, one message per line."""
    messages = trajectory.messages
    lines = [message for message in messages if include_system_prompt or message.get("role") != "system"]
    if include_meta:
        meta = {"request_id": trajectory.request_id, "status": trajectory.status, "stop_reason": trajectory.stop_reason}
        lines.insert(0, {"role": "meta", "content": "", "meta": meta})
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    file.write_text(text, "utf-8", "replace")
