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
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet.agents import Agent, StepType, StopReason, as_model_function, register_agent
from ajet.agents.ready import agent_class, agent_names
from ajet.agents.tools import ToolContext, get_global_tool_registry
from ajet.compat.agentic_rollout.agents import (
    BaseAgent,
    CodingAgent,
    GeneralAgent,
    ReactAgent,
    ToolAgent,
    Trajectory,
)
from ajet.compat.agentic_rollout.batch import LLMAPIClient, create_llm_client, generate_sequences, new_request_ids
from ajet.compat.agentic_rollout.tools import (
    BaseAgenticTool,
    BashExecutorTool,
    CalculatorTool,
    FileEditorTool,
    FinishTool,
    SearchTool,
    SimpleAgenticTool,
    ToolCallInfo,
    ToolRegistry,
    ToolResult,
    create_openai_tool_schema,
    create_tool,
    create_tools,
    register_tool,
)
from ajet.environment.sandboxes import SandboxSettings, open_sandbox
from ajet.schema.episode import Failure
from ajet.schema.trajectory import SUFFIX, TrajectoryStep, file_name, write_trajectory
from ajet.schema.trajectory import Trajectory as _Trajectory

__all__ = [
    "AgenticBaseTool",
    "AgenticRollout",
    "AgenticRolloutConfig",
    "BaseAgent",
    "BaseAgenticTool",
    "BashExecutorTool",
    "CalculatorTool",
    "CodingAgent",
    "FileEditorTool",
    "FinishTool",
    "GeneralAgent",
    "LLMAPIClient",
    "ReactAgent",
    "SearchTool",
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

AgenticBaseTool = BaseAgenticTool

_SANDBOXED = "the tool without the prefix, in a sandbox (docs: sandboxes)"
_CODING = "CodingAgent with a sandbox"
_INSTEAD = {
    "K8s": _SANDBOXED,
    "R2E": _SANDBOXED,
    "SweAgent": _CODING,
    "SweToolsIcepopMessagesAgent": _CODING,
    "Prompt": "text as system_prompt, made by str.format or Jinja",
    "RolloutProfiler": "`ajet view`, which shows each call and tool in time",
}
"""By the beginnings of their names: parts of the library that there are not, and what to take."""


def __getattr__(name: str) -> Any:
    for begins, instead in _INSTEAD.items():
        if name.startswith(begins):
            raise ImportError(f"{name} is not offered: take {instead}", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class AgenticRolloutConfig:
    """What `AgenticRollout` is set up with."""

    agent_type: str = "react"
    max_steps: int = 10
    max_tokens_per_step: int = 16000
    temperature: float = 0.7
    tools_config: Mapping[str, Any] | None = None
    concurrent_requests: int = 4
    batch_size: int = 1
    """As in the library, nothing depends on it."""
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
        sandbox: SandboxSettings | str | None = None,
        **more: Any,
    ) -> None:
        """`sandbox`: where tools run commands and keep files, a fresh one for each prompt; text is a kind."""
        self.sandbox = SandboxSettings(kind=sandbox) if isinstance(sandbox, str) else sandbox
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
            async with AsyncExitStack() as stack:
                own: dict[str, Any] = {}
                if self.sandbox is not None:
                    sandbox = await stack.enter_async_context(open_sandbox(self.sandbox))
                    own["context"] = ToolContext(sandbox, request_id)
                made: Trajectory = await self.agent.run_trajectory(
                    prompt, model, request_id, raise_errors=False, save_to=save_to, **own
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
