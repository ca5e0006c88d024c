"""`GroupWorkflow`: runs a whole group of our episodes as one of Trinity's workflows; `TrinityTaskReader` feeds it.

Trinity lets a workflow repeat its task by itself, so one call is one group: retries, refilling and dynamic rollout are
our pool's, as with every backbone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trinity.buffer.buffer_reader import BufferReader
from trinity.common.config import StorageConfig
from trinity.common.experience import Experience
from trinity.common.workflows.workflow import Task, Workflow

from ajet.backbone.ray.collector import GroupRunner
from ajet.backbone.ray.payload import RunPayload, training_stream, validation_tasks
from ajet.backbone.ray.rows import empty_experience, group_experiences
from ajet.backbone.ray.trinity.host import HostedGroups, group_runner
from ajet.schema.episode import EpisodeGroup
from ajet.schema.task import Task as AjetTask

_runners: dict[str, GroupRunner] = {}
"""By the run's payload. Trinity builds a workflow per task; what they need opens once per process."""


def _runner_of(payload: str, model: Any, processes: int) -> GroupRunner:
    if payload not in _runners:
        run = RunPayload.decode(payload)
        _runners[payload] = HostedGroups(run, model) if run.remote_runners else group_runner(run, model, processes)
    return _runners[payload]


class GroupWorkflow(Workflow):  # type: ignore[misc]
    """Built by Trinity for each task."""

    can_repeat = True
    is_async = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._repeats = 1
        given = task.workflow_args
        self._runner = _runner_of(given["payload"], model, given["processes"])

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """The group's number of episodes."""
        self._repeats = repeat_times
        self.run_id_base = run_id_base

    async def run_async(self) -> list[Experience]:
        """Run the group. A failure is reported, and ends the run: Trinity would go on without the group, or wait for an
        hour if it has none."""
        try:
            return await self._run()
        except Exception as error:
            await self._runner.report(error)
            raise

    async def _run(self) -> list[Experience]:
        task = AjetTask.model_validate_json(self.task.raw_task["task"])
        validation = bool(self.task.is_eval)
        uid = group_name(self.task.batch_id, self.task.task_id)
        await self._runner.open()  # that is not part of the rollout's time
        begin = time.time()
        group = await self._runner.run_group(
            task,
            group_id=uid,
            batch_index=int(self.task.task_id),
            step=step_of(self.task.batch_id),
            occurrence=self.task.raw_task["occurrence"],
            validation=validation,
            num_repeat=self._repeats,
        )
        return self._experiences(group, uid, (begin, time.time()), validation=validation)

    def _experiences(
        self, group: EpisodeGroup, uid: str, span: tuple[float, float], *, validation: bool
    ) -> list[Experience]:
        if validation or not group.complete:
            return [empty_experience(group, uid=uid, span=span)]
        return group_experiences(group, [self._runner.samples(one) for one in group.episodes], uid=uid, span=span)


def group_name(batch: int | str, task: int | str) -> str:
    """The group's name: step, and place in its batch."""
    return f"{batch}/{task}"


def step_of(batch: int | str) -> int:
    """The step that a batch belongs to; a validation's is `STEP/NAME`."""
    return int(str(batch).partition("/")[0])


class TrinityTaskReader(BufferReader):  # type: ignore[misc]
    """Built by Trinity's explorer: once for training, and for each validation."""

    def __init__(self, config: StorageConfig) -> None:
        run = RunPayload.decode(config.workflow_args["payload"])
        run.enter()
        loaded = run.load_config()
        self._config = config
        self._position = config.index
        if config.is_eval:
            tasks = validation_tasks(loaded)
            self._task_at: Callable[[int], AjetTask] = tasks.__getitem__
            self._occurrence: Callable[[int], int] = lambda index: 0
            self._end = len(tasks)
        else:
            stream = training_stream(loaded)
            self._task_at, self._occurrence = stream.task_at, stream.occurrence_at
            self._end = run.total_steps * loaded.ajet.data.train_batch_size

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Task]:
        """The next tasks. Raises `StopAsyncIteration` after the last one."""
        if self._position >= self._end:
            raise StopAsyncIteration
        end = min(self._end, self._position + (batch_size or self._config.batch_size))
        tasks = [self._task(index) for index in range(self._position, end)]
        self._position = end
        return tasks

    def __len__(self) -> int:
        return self._end

    def state_dict(self) -> dict[str, Any]:
        return {"current_index": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position = int(state_dict["current_index"])

    def _task(self, index: int) -> Task:
        return Task(
            workflow=GroupWorkflow,
            repeat_times=self._config.repeat_times,
            workflow_args=self._config.workflow_args,
            is_eval=self._config.is_eval,
            raw_task={"task": self._task_at(index).model_dump_json(), "occurrence": self._occurrence(index)},
            index={"index": index},
        )
