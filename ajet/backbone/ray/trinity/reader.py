"""`TrinityTaskReader`: our tasks, in our order, as a reader of Trinity's. The explorer's state holds its position.

The position counts tasks over all epochs, so a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity.buffer.buffer_reader import BufferReader
from trinity.common.config import StorageConfig
from trinity.common.workflows.workflow import Task

from ajet.backbone.ray.payload import RunPayload, training_stream, validation_tasks
from ajet.schema.task import Task as AjetTask


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
        from ajet.backbone.ray.trinity.workflow import GroupWorkflow

        return Task(
            workflow=GroupWorkflow,
            repeat_times=self._config.repeat_times,
            workflow_args=self._config.workflow_args,
            is_eval=self._config.is_eval,
            raw_task={"task": self._task_at(index).model_dump_json(), "occurrence": self._occurrence(index)},
            index={"index": index},
        )
