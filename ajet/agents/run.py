"""`AgentRun`: the state of one run of an agent, its limits, and the `World` it may act in. The agent itself holds none
of it, so it serves many runs at a time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from ajet.agents.model_function import Message, ModelFunction, ModelMessage, ToolSchema, joined_text
from ajet.agents.reply_format import ReplyFormat
from ajet.agents.tools.tool import Arguments, StatelessTool, Tool, ToolContext, ToolResult, ToolSetupError, check_name
from ajet.environment import StepResult
from ajet.schema.errors import UserError
from ajet.schema.trajectory import (
    NO_CALL,
    ModelCall,
    StepType,
    StopReason,
    Trajectory,
    TrajectoryFile,
    TrajectoryStep,
    Usage,
)

if TYPE_CHECKING:
    from ajet.agents.tools import Toolset

TOKENS_PER_CHARACTER = 0.3
"""An estimate for plain text. Digits and characters beyond ASCII count as a token each, as with most tokenizers."""
_WHOLE = re.compile(r"[0-9]|[^\x00-\x7f]")

OnStep = Callable[[TrajectoryStep], object]


class AgentRun:
    """One run: its trajectory, the conversation as it stands, and what it may still use."""

    def __init__(
        self,
        trajectory: Trajectory,
        model: ModelFunction,
        context: ToolContext,
        reply_format: ReplyFormat,
        *,
        max_seconds: float | None = None,
        save_to: Path | None = None,
        on_step: OnStep | None = None,
        world: OneAtATime | None = None,
    ) -> None:
        self.trajectory = trajectory
        self.model = model
        self.context = context
        self.format = reply_format
        self.world = world
        self.schemas: list[ToolSchema] = []
        self.messages: list[Message] = []
        """The conversation, as the next call sends it."""
        self.state: dict[str, Any] = {}
        """Free for your own agent's state during a run."""
        self.asking = False
        """Whether a model call is under way: if it raises, the model is to blame."""
        self._sent = 0
        self._tip = NO_CALL
        self._began = time.monotonic()
        self._max_seconds = max_seconds
        self._scale = 1.0
        """How many tokens the model's prompts have for each that was estimated."""
        self._on_step = on_step
        self._save_to = save_to
        self._file: TrajectoryFile | None = None

    def offer(self, toolset: Toolset) -> None:
        """Begin, with these tools."""
        self.toolset = toolset
        self.schemas = self.trajectory.tools = toolset.schemas()
        self._began = time.monotonic()

    # ------------------------------------------------------------ limits

    @property
    def seconds_left(self) -> float | None:
        return None if self._max_seconds is None else max(0.0, self._began + self._max_seconds - time.monotonic())

    @property
    def model_steps(self) -> int:
        """Model calls so far, summaries not counted."""
        return sum(not call.purpose for call in self.trajectory.calls)

    def prompt_tokens(self) -> int:
        """About how many tokens the next prompt has."""
        unseen = self.messages[self._sent :]
        if self._tip == NO_CALL:
            return round(self._scale * (_estimate(self.messages) + _estimate(self.schemas)))
        usage = self.trajectory.calls[self._tip].usage
        return usage.input_tokens + usage.output_tokens + round(self._scale * _estimate(unseen))

    # ------------------------------------------------------------ what happens

    def add(self, *messages: Message) -> None:
        """Go on with these messages."""
        self.messages += messages

    def restart(self, messages: Sequence[Message]) -> None:
        """Begin a new branch: from here on this is the conversation."""
        self.messages = list(messages)
        self._sent, self._tip = 0, NO_CALL

    def record(self, step_type: StepType, content: str = "", **facts: Any) -> TrajectoryStep:
        """Add a step to the trajectory, and to its file."""
        step = TrajectoryStep(step_type, content, **facts)
        self.record_step(step)
        return step

    def record_step(self, step: TrajectoryStep) -> None:
        self.trajectory.steps.append(step)
        self._save()
        if self._on_step is not None:
            self._on_step(step)

    def record_call(self, reply: ModelMessage, started: float, purpose: str = "") -> int:
        """Add a model call; `started` is on the monotonic clock. Its reply becomes part of the conversation. Returns
        its index."""
        usage = reply.usage
        estimate = _estimate(self.messages) + _estimate(self.schemas)
        if usage is None:
            usage = Usage(round(estimate), round(_estimate(reply)), False)
        elif estimate and usage.input_tokens:
            self._scale = usage.input_tokens / estimate
        call = ModelCall(
            new_messages=self.messages[self._sent :],
            reply=dict(reply),
            extends=self._tip,
            finish_reason=reply.finish_reason,
            usage=usage,
            started_s=started - self._began,
            seconds=time.monotonic() - started,
            reply_id=reply.reply_id,
            purpose=purpose,
        )
        self.trajectory.calls.append(call)
        self.messages.append(call.reply)
        self._sent, self._tip = len(self.messages), len(self.trajectory.calls) - 1
        self._save()
        return self._tip

    def end(self, reason: StopReason, **facts: Any) -> None:
        """The run ends; only the first reason counts."""
        self.trajectory.end(reason, **facts)

    def close(self) -> None:
        """Write the end of the trajectory."""
        self.trajectory.pending = self.messages[self._sent :]
        self.trajectory.seconds = time.monotonic() - self._began
        self._save()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _save(self) -> None:
        if self._file is None and self._save_to is not None:
            self._file = TrajectoryFile(self._save_to, self.trajectory)
        if self._file is not None:
            self._file.update()


def _estimate(value: Any) -> float:
    """About how many tokens messages or tools have."""
    text = json.dumps(value, ensure_ascii=False, default=repr) if value else ""
    whole = len(_WHOLE.findall(text))
    return whole + TOKENS_PER_CHARACTER * (len(text) - whole)


ACT = {
    "name": "act",
    "description": "Act in the environment, and see what comes of it.",
    "parameters": {
        "type": "object",
        "properties": {"action": {"type": "string", "description": "The action, as the task describes it"}},
        "required": ["action"],
        "additionalProperties": False,
    },
}
"""A tool for agents that can only call tools, in environments that offer none."""


class World(Protocol):
    """One run's world, which has begun already."""

    @property
    def beginning(self) -> str:
        """A message to the agent after its task. Empty: the task itself says it."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that it offers, in OpenAI's form."""

    async def act(self, action: str | Mapping[str, Any]) -> StepResult:
        """What an action led to (a text, or a message with `tool_calls`), as a text."""


class OneAtATime:
    """A world in which calls of one reply act one after the other, and not beyond the end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done = False
        self._free = asyncio.Lock()

    async def act(self, action: str | Mapping[str, Any]) -> StepResult | None:
        """None: it is over."""
        async with self._free:
            if self.done:
                return None
            step = await self.world.act(action)
            self.done = step.done
            return step


def world_tools(world: OneAtATime, *, only_tools: bool) -> list[Tool]:
    """The tools by which an agent acts. `only_tools`: it has no other way."""
    tools: list[Tool] = []
    for schema in world.world.tools:
        function = schema.get("function", schema)
        well_formed = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not well_formed or not isinstance(function.get("parameters") or {}, Mapping):
            raise ToolSetupError(f"the environment's `tools` should have the form of OpenAI's, not {schema!r:.200}")
        tools.append(_WorldTool(world, function))
    return tools or ([_Act(world)] if only_tools else [])


class _WorldTool(StatelessTool):
    """A tool that the world offers."""

    limits_itself = True  # a step has `rollout.environment.timeout`, or as long as the episode

    def __init__(self, world: OneAtATime, function: Mapping[str, Any]) -> None:
        self.name = check_name(function["name"])
        self.description = str(function.get("description") or self.name)
        self.parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        self._world = world
        self._calls = 0

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        step = await self._world.act(self.action(arguments))
        if step is None:
            return ToolResult("Not executed: the episode is over.", success=False)
        return ToolResult(step.observation, ends_episode=step.done, data={"reward": step.reward})

    def action(self, arguments: Arguments) -> str | Mapping[str, Any]:
        """The call as a message."""
        self._calls += 1
        function = {"name": self.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": f"{self.name}-{self._calls}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class _Act(_WorldTool):
    """The one tool of worlds that offer none."""

    def __init__(self, world: OneAtATime) -> None:
        super().__init__(world, ACT)

    def action(self, arguments: Arguments) -> str | Mapping[str, Any]:
        return str(arguments["action"])


class AgentSettingsError(UserError):
    """Settings of an agent that make no sense."""


class AgentNameTakenError(AgentSettingsError, ValueError):
    """There is an agent of this name already."""


def check_above_zero(key: str, value: Any, *, whole: bool = True) -> None:
    """Raises AgentSettingsError for a setting that is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
        kind = "whole number" if whole else "number"
        raise AgentSettingsError(f"{key}: {value!r} is not allowed: give a {kind} above 0")


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Where a run of an agent ends, whatever the model does. None: no limit."""

    max_steps: int = 10
    """Model calls, summaries not counted."""
    max_tokens: int | None = None
    """Tokens of all replies together."""
    max_seconds: float | None = None
    max_output_chars: int = 20_000
    """The limit for one tool call's output, as the model sees it."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            if (value := getattr(self, entry.name)) is not None:
                check_above_zero(entry.name, value, whole=entry.name != "max_seconds")


WhenFull = Literal["drop", "summarise", "stop"]
FULL_SHARE = 0.8
"""The usable share of the window: the rest is for the reply and for the error of the estimate."""
ROOM_SHARE = 0.5
"""Down to which share of the window old tool output is dropped: dropping a little each time would make each call a
branch of its own, which no engine can reuse."""
KEEP_LAST = 2
"""Messages at the end that are never touched: what the model is working on."""
SUMMARISE = (
    "The conversation is about to exceed your context window. Write down, for yourself, what the task is, what you "
    "have done and found out, and what remains to be done. Nothing else of this conversation will be kept."
)
DONE = "What has been done so far, in your own words:\n\n"


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """How much fits, and what to do about it."""

    tokens: int | None = None
    """The model's window. None: unknown, so nothing is done until the model refuses."""
    when_full: WhenFull = "drop"
    """`drop`: leave out old tool output; `summarise`: ask the model for a summary and go on from it; `stop`."""

    def __post_init__(self) -> None:
        if self.when_full not in get_args(WhenFull):
            raise AgentSettingsError(f"when_full: {self.when_full!r} is not one of {', '.join(get_args(WhenFull))}")
        if self.tokens is not None:
            check_above_zero("context_tokens", self.tokens, whole=False)

    def is_full(self, prompt_tokens: int) -> bool:
        """Whether a prompt of about this size leaves too little room."""
        return self.tokens is not None and prompt_tokens > FULL_SHARE * self.tokens

    def without_old_output(self, messages: Sequence[Message], prompt_tokens: int) -> list[Message] | None:
        """The conversation with its oldest tool output left out, as much as is needed. None: there is none to leave
        out."""
        assert self.tokens is not None
        kept = list(messages)
        characters = sum(len(_text(message)) for message in messages)
        per_character = prompt_tokens / max(1, characters)
        excess = (prompt_tokens - ROOM_SHARE * self.tokens) / per_character
        saved = 0.0
        for index, message in enumerate(messages[: len(messages) - KEEP_LAST]):
            if saved >= excess:
                break
            shorter = _dropped(message)
            if shorter is not None:
                saved += len(_text(message)) - len(_text(shorter))
                kept[index] = shorter
        return kept if saved > 0 else None

    @staticmethod
    def after_summary(messages: Sequence[Message], summary: str) -> list[Message]:
        """The system prompt, the task, and the summary in place of everything since, an earlier summary included."""
        opening = list(messages[: _opening(messages)])
        note = f"{DONE}{summary}\n\nGo on from here."
        if opening and opening[-1].get("role") == "user":  # many templates want users and assistants in turn
            return [*opening[:-1], {**opening[-1], "content": _with_note(opening[-1].get("content"), note)}]
        return [*opening, {"role": "user", "content": note}]


def _with_note(content: Any, note: str) -> Any:
    """A task's content, with this note in place of an earlier one."""
    if isinstance(content, list):
        parts = [part for part in content if not str(part.get("text") or "").startswith(DONE)]
        return [*parts, {"type": "text", "text": note}]
    task = str(content or "").partition(DONE)[0].removesuffix("\n\n")
    return "\n\n".join(filter(None, (task, note)))


def _opening(messages: Sequence[Message]) -> int:
    """How many messages come before the model's first."""
    roles = [message.get("role") for message in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def _dropped(message: Message) -> Message | None:
    """The message with its tool output left out. None: it holds none, or too little to be worth it."""
    text = _text(message)
    is_output = message.get("role") == "tool" or (message.get("role") == "user" and text.startswith("Observation"))
    note = f"(output of {len(text)} characters, left out to make room: call the tool again if you need it)"
    if not is_output or len(text) <= len(note) + 20:
        return None
    return {**message, "content": f"Observation: {note}" if message["role"] == "user" else note}


def _text(message: Message) -> str:
    content = joined_text(message.get("content"))
    return content if isinstance(content, str) else ""
