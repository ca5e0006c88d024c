"""`Agent`: a model, its tools, and the loop between them. The base of the ready agents, and of your own.

An agent object holds settings only. What one run leaves behind is in its `AgentRun`, so the same object serves many
runs at a time, in a script, an evaluation or training. A run ends within its limits whatever the model writes; if the
model itself fails, the run is recorded as failed and the model's exception is raised.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ajet.agents.model_function import (
    UNFINISHED,
    AgentReply,
    Message,
    ModelFunction,
    ModelMessage,
    ToolCall,
    as_message,
    as_model_function,
    text_of,
)
from ajet.agents.reply_format import NativeFormat, ReplyFormat, TextFormat, prompt_messages, split_thinking
from ajet.agents.run import (
    SUMMARISE,
    AgentLimits,
    AgentRun,
    AgentSettingsError,
    ContextWindow,
    OneAtATime,
    OnStep,
    WhenFull,
    World,
    world_tools,
)
from ajet.agents.tools import Toolset, make_tools
from ajet.agents.tools.tool import Tool, ToolContext, ToolSource
from ajet.schema.episode import Failure
from ajet.schema.errors import EngineError, address_of
from ajet.schema.trajectory import StepType, StopReason, Trajectory, TrajectoryStep, file_name

FormatName = Literal["auto", "native", "text"]
FORMATS: Mapping[str, Callable[[], ReplyFormat]] = {"native": NativeFormat, "text": TextFormat}
NOT_RUN = "Not executed: {why}. Ask for it again if you still need it."


class Agent:
    """Asks the model, runs the tools it asks for, and tells it the results, until it answers.

    For an agent of your own override what differs: `create_system_prompt`, `should_continue`, `format_messages`,
    `parse`, `execute_tool_call`, `finalize`, or `step` as a whole. Keep what a run must remember in `run.state`.
    """

    system_prompt_default: ClassVar[str] = ""
    one_call_per_step: ClassVar[bool] = False
    """Only the first tool call of a reply is run."""
    trajectory_class: ClassVar[type[Trajectory]] = Trajectory

    def __init__(
        self,
        *,
        name: str = "",
        system_prompt: str | None = None,
        tools: Sequence[Any] = (),
        format: FormatName = "auto",
        max_steps: int = 10,
        max_tokens: int | None = None,
        max_seconds: float | None = None,
        max_output_chars: int = 20_000,
        context_tokens: int | None = None,
        when_full: WhenFull = "drop",
        parallel_tool_calls: bool = True,
        sampling: Mapping[str, Any] | None = None,
        base_dirs: Sequence[str | Path] = (),
    ) -> None:
        """`tools`: tools, functions, or their specifications as `make_tools` takes them. `format`: how the model calls
        them; `auto`: natively, unless its function has no argument `tools`. `sampling`: passed to the model with each
        call.
        """
        check_kind("name", name, str)
        check_kind("system_prompt", system_prompt or "", str)
        check_kind("sampling", sampling or {}, Mapping)
        self.name = name or type(self).__name__
        self.system_prompt = self.system_prompt_default if system_prompt is None else system_prompt
        self.tools = make_tools(tools, base_dirs)
        if format not in ("auto", *FORMATS):
            raise AgentSettingsError(f"format: {format!r} is not one of auto, {', '.join(FORMATS)}")
        self.format = format
        self.limits = AgentLimits(max_steps, max_tokens, max_seconds, max_output_chars)
        self.window = ContextWindow(context_tokens, when_full)
        self.parallel_tool_calls = parallel_tool_calls
        self.sampling = dict(sampling or {})

    # ------------------------------------------------------------ one run

    async def run_trajectory(
        self,
        prompt: Any,
        model: Any,
        *,
        request_id: str = "",
        context: ToolContext | None = None,
        save_to: str | Path | None = None,
        on_step: OnStep | None = None,
        raise_errors: bool = True,
        metadata: Mapping[str, Any] | None = None,
        world: World | None = None,
    ) -> Trajectory:
        """Work on `prompt` (text, messages, a task, or a mapping that holds one) with `model`, a model function or what
        `as_model_function` makes one of.

        `save_to`: a folder, or a file that ends in `.jsonl`, to which the trajectory is written as it grows.
        `raise_errors=False`: a run that failed is returned, with `status` and `failure`, instead of raising.
        `world`: an environment, in which it acts until that is over.
        """
        function = as_model_function(model)
        trajectory = self.trajectory_class(
            request_id=request_id or uuid.uuid4().hex,
            task_id=str(getattr(prompt, "task_id", "") or ""),
            agent=self.name,
            model=str(getattr(function, "model", "") or ""),
            metadata=dict(metadata or {}),
        )
        run = AgentRun(
            trajectory,
            function,
            context or ToolContext(episode_id=trajectory.request_id),
            self._reply_format(function),
            max_seconds=self.limits.max_seconds,
            save_to=None if save_to is None else _file(Path(save_to), trajectory.request_id),
            on_step=on_step,
            world=None if world is None else OneAtATime(world),
        )
        messages = prompt_messages(prompt)
        try:
            await self._guarded(run, messages)
        except Exception:  # the trajectory says what it was
            if raise_errors:
                raise
        finally:
            run.close()
        return trajectory

    def run_tools(self, context: ToolContext) -> list[Tool | ToolSource]:
        """The tools of a run."""
        return self.tools

    async def _guarded(self, run: AgentRun, messages: Sequence[Message]) -> None:
        """The whole run. However it ends, the trajectory says how."""
        try:
            async with self._toolset(run) as toolset:
                run.offer(toolset)
                await self._loop(run, messages)
                await self.finalize(run)
        except asyncio.CancelledError:
            run.end(StopReason.CANCELLED)
            raise
        except Exception as error:  # whatever it is, the trajectory names it before it is raised on
            reason = StopReason.MODEL_ERROR if run.asking else StopReason.AGENT_ERROR
            run.end(reason, failure=Failure(type(error).__name__, _said(error)))
            raise

    def _toolset(self, run: AgentRun) -> Toolset:
        tools = list(self.run_tools(run.context))
        if run.world is not None:
            tools += world_tools(run.world, only_tools=self.one_call_per_step)
        return Toolset(tools, run.context, output_chars=self.limits.max_output_chars)

    async def _loop(self, run: AgentRun, messages: Sequence[Message]) -> None:
        """Run the agent, from the first message until something ends it."""
        try:
            async with asyncio.timeout(run.seconds_left) as deadline:
                await self.begin(run, messages)
                while self.should_continue(run):
                    await self.step(run)
        except TimeoutError:
            if not deadline.expired():
                raise
            run.asking = False
            run.end(StopReason.MAX_SECONDS)
        run.end(StopReason.AGENT)

    async def begin(self, run: AgentRun, messages: Sequence[Message]) -> None:
        """Put the first messages into the conversation."""
        system = "\n\n".join(filter(None, (self.create_system_prompt(), run.format.introduction(run.schemas))))
        given = [text_of(message) for message in messages if message.get("role") == "system"]
        if system or given:
            run.add({"role": "system", "content": "\n\n".join(filter(None, (system, *given)))})
        for message in messages:
            if message.get("role") != "system":
                run.add(dict(message))
                run.record(StepType.OBSERVATION, text_of(message))
        if run.world is not None and run.world.world.beginning:
            self.tell(run, run.world.world.beginning)

    async def step(self, run: AgentRun) -> None:
        """One model call, and the tools that it asks for."""
        if not await self.make_room(run):
            run.end(StopReason.CONTEXT_FULL)
            return
        reply, call = await self.ask(run, run.format.request(run.schemas))
        parsed = self.parse(reply, run)
        if parsed.thought:
            run.record(StepType.THOUGHT, parsed.thought, call=call)
        if (why := reply.no_answer) is not None and not (parsed.calls and why is StopReason.REPLY_CUT):
            if said := parsed.answer or reply.get("refusal"):
                run.record(StepType.THOUGHT, said, call=call)
            run.end(why)
        elif parsed.problem:
            self.tell(run, parsed.problem)
        elif parsed.calls:
            await self.act(run, parsed.calls, call)
        elif run.world is not None and not self.one_call_per_step:
            await self.act_in_world(run, run.world, parsed.answer or "", call)
        else:
            await self.answered(run, parsed.answer or "", call)

    # ------------------------------------------------------------ what an agent of one's own overrides

    def create_system_prompt(self) -> str:
        """The system message, without what the reply format and the task add to it."""
        return self.system_prompt

    def should_continue(self, run: AgentRun) -> bool:
        """Whether there is another step. Says why, if a limit is reached."""
        limits, used = self.limits, run.trajectory.usage.output_tokens
        if run.model_steps >= limits.max_steps:
            run.end(StopReason.MAX_STEPS)
        elif limits.max_tokens is not None and used >= limits.max_tokens:
            run.end(StopReason.MAX_TOKENS)
        return run.trajectory.stop_reason is None

    def format_messages(self, run: AgentRun) -> list[Message]:
        """The messages of the next call."""
        return list(run.messages)

    def parse(self, message: Message, run: AgentRun) -> AgentReply:
        """Read a reply."""
        return run.format.parse(message, run.schemas)

    async def execute_tool_call(self, tool_call: ToolCall, run: AgentRun) -> TrajectoryStep:
        """Run one tool. What the model did wrong is a result with `success=False` that says what to do."""
        started = time.monotonic()
        result = await run.toolset.call(tool_call.name, tool_call.arguments)
        return TrajectoryStep(
            StepType.ACTION_RESULT,
            result.output,
            tool_name=tool_call.name,
            tool_args=tool_call.arguments,
            tool_result=result.data,
            tool_call_id=tool_call.call_id,
            success=result.success,
            reward_score=result.reward,
            seconds=time.monotonic() - started,
            metadata={
                **({"ends_episode": True} if result.ends_episode else {}),
                **({"metrics": dict(result.metrics)} if result.metrics else {}),
            },
        )

    async def answered(self, run: AgentRun, answer: str, call: int) -> None:
        """The model answered instead of calling a tool."""
        run.record(StepType.FINAL_ANSWER, answer, call=call)
        run.end(StopReason.ANSWER)

    async def act_in_world(self, run: AgentRun, world: OneAtATime, action: str, call: int) -> None:
        """What the model said is its action."""
        run.record(StepType.ACTION, action, call=call)
        came = await world.act(action)
        assert came is not None  # it would have ended the run
        if came.done:
            run.record(StepType.OBSERVATION, came.observation, metadata={"reward": came.reward})
            run.end(StopReason.ENVIRONMENT)
        else:
            self.tell(run, came.observation)

    async def finalize(self, run: AgentRun) -> None:
        """Called once at the end of a run that neither failed nor was cancelled, with its tools still open."""

    # ------------------------------------------------------------ parts of a step

    async def ask(self, run: AgentRun, request: Mapping[str, Any], purpose: str = "") -> tuple[ModelMessage, int]:
        """One model call. Returns the reply and the call's index in the trajectory."""
        arguments = {**self.sampling, **request}
        if (own := self.sampling.get("stop")) and "stop" in request:
            arguments["stop"] = [*request["stop"], *([own] if isinstance(own, str) else own)]
        if self.limits.max_tokens is not None:
            left = self.limits.max_tokens - run.trajectory.usage.output_tokens
            # OpenAI's API takes one of the two, and which one it is depends on the model
            limit = "max_completion_tokens" if "max_completion_tokens" in arguments else "max_tokens"
            arguments[limit] = max(1, min(left, arguments.get(limit) or left))
        if (self.one_call_per_step or not self.parallel_tool_calls) and arguments.get("tools"):
            arguments["parallel_tool_calls"] = False
        started = time.monotonic()
        run.asking = True
        message = as_message(await run.model(self.format_messages(run), **arguments))
        if message.finish_reason in UNFINISHED:
            raise EngineError(f"the model's server gave up on the reply: its finish_reason is {message.finish_reason}")
        run.asking = False
        return message, run.record_call(message, started, purpose)

    async def act(self, run: AgentRun, calls: Sequence[ToolCall], call: int) -> None:
        """Run the tool calls of one reply, and tell the model what came of them."""
        for asked in calls:
            facts = {"tool_name": asked.name, "tool_args": asked.arguments, "tool_call_id": asked.call_id}
            run.record(StepType.ACTION, _shown(asked), call=call, **facts)
        steps = await self._run_tools(run, calls)
        for step in steps:
            step.call = call
            run.record_step(step)
        run.add(*run.format.results([(asked, step.content) for asked, step in zip(calls, steps, strict=True)]))
        for step in steps:
            if step.metadata.get("ends_episode"):
                run.record(StepType.FINAL_ANSWER, _answer_of(step), call=call)
                run.end(StopReason.TOOL)
                break

    async def _run_tools(self, run: AgentRun, calls: Sequence[ToolCall]) -> list[TrajectoryStep]:
        """The results, in the order of the calls."""
        if self.parallel_tool_calls and not self.one_call_per_step:
            running = [asyncio.ensure_future(self.execute_tool_call(asked, run)) for asked in calls]
            try:
                return list(await asyncio.gather(*running))
            finally:
                for each in running:  # if one has ended the run, no other acts on
                    each.cancel()
        steps: list[TrajectoryStep] = []
        for asked in calls:
            if steps and self.one_call_per_step:
                steps.append(_not_run(asked, "only one tool call is allowed in each step"))
            elif steps and steps[-1].metadata.get("ends_episode"):
                steps.append(_not_run(asked, f"{steps[-1].tool_name} ended the episode"))
            else:
                steps.append(await self.execute_tool_call(asked, run))
        return steps

    def tell(self, run: AgentRun, text: str) -> None:
        """Tell the model something besides tool results."""
        run.add(run.format.tell(text))
        run.record(StepType.OBSERVATION, text)

    async def make_room(self, run: AgentRun) -> bool:
        """If the conversation fills the model's window, begin a shorter one. False: it can't be made shorter."""
        tokens = run.prompt_tokens()
        if not self.window.is_full(tokens):
            return True
        if self.window.when_full == "stop":
            return False
        if self.window.when_full == "drop":
            shorter = self.window.without_old_output(run.messages, tokens)
            if shorter is None:
                return False
            run.restart(shorter)
            return True
        if not any(message.get("role") == "assistant" for message in run.messages):
            return False  # the task alone fills it
        before = list(run.messages)
        run.add(run.format.tell(SUMMARISE))
        request = run.format.request(run.schemas)
        if request.get("tools"):  # they stay in the prompt, which so continues what the engine knows
            request["tool_choice"] = "none"
        summary, _ = await self.ask(run, request, purpose="summary")
        if summary.no_answer is StopReason.REFUSED:
            run.end(StopReason.REFUSED)
        said = split_thinking(str(summary.get("content") or ""))[1]
        if said:  # a summary that was cut is still one; without any, all that was done would be lost
            run.restart(self.window.after_summary(before, said))
        return bool(said) and run.trajectory.stop_reason is None

    def _reply_format(self, function: ModelFunction) -> ReplyFormat:
        name: str = self.format
        if name == "auto":
            name = "native" if function.takes_tools else "text"
        return FORMATS[name]()


KINDS: Mapping[type, str] = {str: "text", bool: "true or false", Mapping: "a mapping"}


def check_kind(key: str, value: Any, kind: type) -> None:
    """Raises AgentSettingsError for a setting of another kind."""
    if not isinstance(value, kind):
        raise AgentSettingsError(f"{key}: {value!r} is not allowed: give {KINDS[kind]}")


def _said(error: Exception) -> str:
    """Its message, and which address it is about, if it doesn't say so itself."""
    message, address = str(error) or repr(error), address_of(error)
    return f"{message} ({address})" if address and address not in message else message


def _file(place: Path, request_id: str) -> Path:
    return place if place.suffix == ".jsonl" else place / file_name(request_id)


def _shown(call: ToolCall) -> str:
    return f"{call.name}({call.arguments})"


def _not_run(call: ToolCall, why: str) -> TrajectoryStep:
    return TrajectoryStep(
        StepType.ACTION_RESULT,
        NOT_RUN.format(why=why),
        tool_name=call.name,
        tool_args=call.arguments,
        tool_call_id=call.call_id,
        success=False,
    )


def _answer_of(step: TrajectoryStep) -> str:
    """What a tool that ended the episode was given as the answer."""
    for values in (step.tool_result, step.tool_args):
        if isinstance(values, dict) and isinstance(values.get("answer"), str | int | float):
            return str(values["answer"])
    return step.content
