"""`run_batch`: an agent on many tasks, several times each, its trajectories in a folder. Running it again goes on.

A trajectory is finished once its reward (or that it has none) is in its file; the next time, only such files are left
out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet.agents.agent import Agent
from ajet.agents.tools.tool import ToolContext
from ajet.environment.sandboxes import SandboxSettings, open_sandbox
from ajet.schema.episode import Failure
from ajet.schema.errors import UserError
from ajet.schema.task import Task, WorkflowTask
from ajet.schema.trajectory import StopReason, Trajectory
from ajet.schema.trajectory_file import file_name, read_trajectory, write_end

FINISHED = "finished"
"""In a trajectory's metadata: nothing more is to be done for it."""
GIVE_UP_AFTER = 8
"""So many failures of the model without any success: its server is down, or refuses every request."""

Judge = Callable[[Task, Trajectory], Awaitable[None]]
"""Sets the trajectory's `reward` and `is_success`."""


class BatchError(UserError):
    """A batch that can't go on."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens."""

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
    prices: Prices = Prices()
    model_name: str = ""
    on_end: Callable[[Trajectory], object] = lambda trajectory: None
    """Told of each trajectory that ends, those of earlier runs of the batch included."""
    sandbox: SandboxSettings | None = None
    """Each run has one of its own. None: there is none."""


async def run_batch(batch: Batch) -> list[Trajectory]:
    """All trajectories, by task. Raises BatchError if the folder holds others, or if the model always fails."""
    ids = [task.task_id for task in batch.tasks]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise BatchError(f"two tasks have the id {twice!r}: their trajectories would have the same file")
    runner = _Runner(batch)
    jobs = [(task, repeat) for task in batch.tasks for repeat in range(batch.repeats)]
    found = {(task.task_id, repeat): runner.earlier(task, repeat) for task, repeat in jobs}
    try:
        async with asyncio.TaskGroup() as group:
            running = {
                (task.task_id, repeat): group.create_task(runner.run(task, repeat))
                for task, repeat in jobs
                if found[task.task_id, repeat] is None
            }
    except ExceptionGroup as errors:
        raise runner.gave_up or errors.exceptions[0] from None
    done = {key: trajectory for key, trajectory in found.items() if trajectory is not None}
    done.update({key: task.result() for key, task in running.items()})
    return [done[task.task_id, repeat] for task, repeat in jobs]


class _Runner:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._free = asyncio.Semaphore(batch.concurrency)
        self.gave_up: BatchError | None = None
        self._failures = 0
        self._played = 0

    def earlier(self, task: Task, repeat: int) -> Trajectory | None:
        """The trajectory of an earlier run of the batch, if it is finished."""
        path = self._path(task, repeat)
        if not path.exists():
            return None
        trajectory = read_trajectory(path)
        if FINISHED not in trajectory.metadata:
            return None
        made_by = (trajectory.model, trajectory.agent)
        if made_by != (self._batch.model_name, self._batch.agent.name):
            raise BatchError(
                f"{path} is by model {made_by[0]!r} and agent {made_by[1]!r}, and this batch is by "
                f"{self._batch.model_name!r} and {self._batch.agent.name!r}: choose another folder"
            )
        self._batch.on_end(trajectory)
        return trajectory

    async def run(self, task: Task, repeat: int) -> Trajectory:
        async with self._free:
            if self.gave_up is not None:
                raise self.gave_up
            batch, path = self._batch, self._path(task, repeat)
            episode_id = f"{task.task_id}-{repeat}"
            async with AsyncExitStack() as stack:
                sandbox = None
                if batch.sandbox is not None:
                    sandbox = await stack.enter_async_context(open_sandbox(batch.sandbox))
                facts = WorkflowTask(task=task, task_id=task.task_id, task_thread_index=repeat)
                trajectory = await batch.agent.run_trajectory(
                    task,
                    batch.model(),
                    request_id=episode_id,
                    context=ToolContext(sandbox, episode_id, facts),
                    save_to=path,
                    raise_errors=False,
                )
            trajectory.repeat, trajectory.model = repeat, batch.model_name
            trajectory.cost = batch.prices.cost(trajectory)
            self._count(trajectory)
            if trajectory.failure is None:
                await self._judge(task, trajectory)
            write_end(path, trajectory)
        batch.on_end(trajectory)
        return trajectory

    async def _judge(self, task: Task, trajectory: Trajectory) -> None:
        try:
            if self._batch.judge is not None:
                await self._batch.judge(task, trajectory)
        except Exception as error:  # noqa: BLE001 - the judge is the user's: it fails this run, not the others
            trajectory.failure = Failure(type(error).__name__, f"the judge raised: {error}")
        else:
            trajectory.metadata[FINISHED] = True

    def _count(self, trajectory: Trajectory) -> None:
        if trajectory.stop_reason is not StopReason.MODEL_ERROR:
            self._played += 1
            return
        self._failures += 1
        if self._failures >= GIVE_UP_AFTER and not self._played:
            assert trajectory.failure is not None
            why = f"{trajectory.failure.kind}: {trajectory.failure.message}"
            self.gave_up = BatchError(
                f"the model failed {self._failures} times and never answered; the last time: {why}"
            )
            raise self.gave_up

    def _path(self, task: Task, repeat: int) -> Path:
        return self._batch.out / file_name(f"{task.task_id}-{repeat}")


def pass_at_k(trajectories: Sequence[Trajectory]) -> dict[int, float]:
    """The chance that one of k runs of a task succeeds, estimated without bias, as a mean over tasks that were run at
    least k times; for powers of two up to the most runs of a task. Runs that failed or have no verdict don't count."""
    played: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        if trajectory.is_success is not None:
            played.setdefault(trajectory.task_id, []).append(trajectory.is_success)
    most = max(map(len, played.values()), default=0)
    result = {}
    for k in sorted({2**power for power in range(most.bit_length())} | ({most} if most else set())):
        enough = [runs for runs in played.values() if len(runs) >= k]
        chances = [1 - math.comb(len(runs) - sum(runs), k) / math.comb(len(runs), k) for runs in enough]
        if chances:
            result[k] = sum(chances) / len(chances)
    return result


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
