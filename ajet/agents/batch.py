"""`run_batch`: an agent on many tasks, several times each, its trajectories in a folder. Running it again goes on.

A trajectory is finished once its reward (or that it has none) is in its file; the next time, only such files are left
out. What a result depends on is in its file, too: a batch with other settings refuses it.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ajet.agents.agent import Agent
from ajet.agents.tools.tool import Tool, ToolContext, ToolSource
from ajet.agents.tools.toolset import tool_schema
from ajet.environment.sandboxes import SandboxSettings, of_task, open_sandbox
from ajet.schema.episode import Failure
from ajet.schema.errors import RewardError, UserError, concurrently
from ajet.schema.task import Task, WorkflowTask
from ajet.schema.trajectory import StopReason, Trajectory, file_name, read_trajectory, write_end, write_trajectory

FINISHED = "finished"
"""The key in a trajectory's metadata that marks it as complete."""
MADE_WITH = "made_with"
"""The key in a trajectory's metadata for the digests of everything its result depends on, by name."""
GIVE_UP_AFTER = 8
"""So many failed runs without any other: the model's server is down, or a tool never opens."""

Judge = Callable[[Task, Trajectory], Awaitable[None]]
"""Sets the trajectory's `reward` and `is_success`."""


class BatchError(UserError):
    """A batch that can't go on."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million tokens."""

    input: float = 0.0
    output: float = 0.0

    def cost(self, trajectory: Trajectory) -> float | None:
        """None: no prices are known."""
        if not (self.input or self.output):
            return None
        usage = trajectory.usage
        return (usage.input_tokens * self.input + usage.output_tokens * self.output) / 1e6


@dataclass(slots=True)
class Batch:
    """What to run, and where it goes."""

    agent: Agent
    tasks: Sequence[Task]
    model: Callable[[], Any]
    """Gives the model function of one run."""
    out: Path
    repeats: int = 1
    concurrency: int = 32
    judge: Judge | None = None
    judge_name: str = ""
    """Tells it from other judges, whose rewards are not taken for its own."""
    prices: Prices = Prices()
    model_name: str = ""
    on_end: Callable[[Trajectory], object] = lambda trajectory: None
    """Called with each trajectory that ends, including those of earlier runs of the batch."""
    sandbox: SandboxSettings | None = None
    """Each run has one of its own, with its task's changes. None: there is none."""


async def run_batch(batch: Batch) -> list[Trajectory]:
    """All trajectories, by task. Raises BatchError if the folder holds others, or if the model always fails."""
    ids = [task.task_id for task in batch.tasks]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise BatchError(f"two tasks have the id {twice!r}: their trajectories would have the same file")
    runner = _BatchRunner(batch)
    jobs = [(task, repeat) for task in batch.tasks for repeat in range(batch.repeats)]
    earlier = [runner.earlier(task, repeat) for task, repeat in jobs]
    missing = [job for job, found in zip(jobs, earlier, strict=True) if found is None]
    played = iter(await concurrently(runner.run(task, repeat) for task, repeat in missing))
    return [found or next(played) for found in earlier]


class _BatchRunner:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._free = asyncio.Semaphore(batch.concurrency)
        self._gave_up: BatchError | None = None
        self._failures = 0
        self._played = 0
        self._settings = settings_of(batch)

    def earlier(self, task: Task, repeat: int) -> Trajectory | None:
        """The trajectory of an earlier run of the batch, if it is finished."""
        path = self._path(task, repeat)
        if not path.exists():
            return None
        with path.open("rb") as file:
            if not file.readline().endswith(b"\n"):  # its process was killed, or the disk was full
                return None
        trajectory = read_trajectory(path)
        if FINISHED not in trajectory.metadata:
            return None
        found, wanted = trajectory.metadata.get(MADE_WITH) or {}, self._made_with(task)
        if other := [name for name, digest in wanted.items() if found.get(name) != digest]:
            raise BatchError(
                f"{path} was made with another {', '.join(other)}: choose another folder, or delete the file to run it "
                "again"
            )
        trajectory.cost = self._batch.prices.cost(trajectory)
        self._batch.on_end(trajectory)
        return trajectory

    def _made_with(self, task: Task) -> dict[str, str]:
        return {**self._settings, "task": _digest(task.model_dump())}

    async def run(self, task: Task, repeat: int) -> Trajectory:
        async with self._free:
            if self._gave_up is not None:
                raise self._gave_up
            batch, path = self._batch, self._path(task, repeat)
            trajectory = await self._play(task, repeat, path)
            trajectory.repeat, trajectory.model = repeat, batch.model_name
            trajectory.cost = batch.prices.cost(trajectory)
            self._count(trajectory)
            if trajectory.failure is None:
                await self._judge(task, trajectory)
            write_end(path, trajectory)
        batch.on_end(trajectory)
        return trajectory

    async def _play(self, task: Task, repeat: int, path: Path) -> Trajectory:
        """One run, as far as it comes."""
        batch, name = self._batch, f"{task.task_id}-{repeat}"
        facts = {MADE_WITH: self._made_with(task)}
        async with AsyncExitStack() as stack:
            try:
                sandbox = None
                if batch.sandbox is not None:
                    sandbox = await stack.enter_async_context(open_sandbox(of_task(batch.sandbox, task.metadata)))
                model = batch.model()
            except Exception as error:  # noqa: BLE001 - whatever it is, it fails this run and not the others
                failed = Trajectory(name, task.task_id, agent=batch.agent.name, metadata=facts)
                failed.end(StopReason.AGENT_ERROR, Failure(type(error).__name__, str(error)))
                write_trajectory(path, failed)
                return failed
            episode = WorkflowTask(task=task, task_id=task.task_id, task_thread_index=repeat)
            return await batch.agent.run_trajectory(
                task,
                model,
                request_id=name,
                context=ToolContext(sandbox, name, episode),
                save_to=path,
                raise_errors=False,
                metadata=facts,
            )

    async def _judge(self, task: Task, trajectory: Trajectory) -> None:
        try:
            if self._batch.judge is not None:
                await self._batch.judge(task, trajectory)
            reward: Any = trajectory.reward
            if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
                raise RewardError(f"the reward is {reward!r}, which is not a finite number")
        except Exception as error:  # noqa: BLE001 - the judge is the user's: it fails this run, not the others
            trajectory.reward = trajectory.is_success = None
            trajectory.failure = Failure(type(error).__name__, f"it could not be judged: {error}")
        else:
            trajectory.metadata[FINISHED] = True

    def _count(self, trajectory: Trajectory) -> None:
        if trajectory.failure is None:
            self._played += 1
            return
        self._failures += 1
        if self._failures >= GIVE_UP_AFTER and not self._played:
            why = f"{trajectory.failure.kind}: {trajectory.failure.message}"
            self._gave_up = BatchError(f"{self._failures} runs failed and none succeeded; the last time: {why}")
            raise self._gave_up

    def _path(self, task: Task, repeat: int) -> Path:
        return self._batch.out / file_name(f"{task.task_id}-{repeat}")


def settings_of(batch: Batch) -> dict[str, str]:
    """Digests of what all results of a batch depend on, besides the tasks and the code."""
    agent = dict(vars(batch.agent))
    tools, sampling = agent.pop("tools"), agent.pop("sampling")
    return {
        "agent": _digest([_name_of(batch.agent), agent]),
        "tools": _digest([_tool_settings(tool) for tool in tools]),
        "sampling": _digest(sampling),
        "model": _digest(batch.model_name),
        "judge": _digest(batch.judge_name),
        "sandbox": _digest(batch.sandbox),
    }


def _tool_settings(tool: Tool | ToolSource) -> list[Any]:
    """What the model is shown of a tool, and what its constructor was given. Not its attributes: some count calls."""
    schema = tool_schema(tool) if isinstance(tool, Tool) else None
    options = inspect.signature(type(tool)).parameters
    return [_name_of(tool), schema, {name: getattr(tool, name, getattr(tool, f"_{name}", None)) for name in options}]


def _digest(value: Any) -> str:
    text = msgspec.json.encode(value, enc_hook=_name_of, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def _name_of(value: Any) -> str:
    """What stands for a value without a JSON form: its own name, or that of its class."""
    if isinstance(value, Path):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def demonstrations(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """The conversations of the successful runs, as `sft.demonstrations` reads them. One that was shortened on its way
    yields a record for each of its branches."""
    records = []
    for trajectory in trajectories:
        if trajectory.is_success:
            extended = {call.extends for call in trajectory.calls}
            ends = [index for index in range(len(trajectory.calls)) if index not in extended]
            tools = {"tools": trajectory.tools} if trajectory.tools else {}
            records += [{"messages": trajectory.conversation(end), **tools} for end in ends]
    return records
