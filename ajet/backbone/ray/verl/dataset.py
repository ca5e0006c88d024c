"""`TaskDataset`: our tasks, in our order, as verl's dataset.

Item `i` is the i-th task of the run, over all epochs, so verl's saved position in the dataset is the position in the
task stream, and a resumed run goes on exactly where it stopped.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from ajet.backbone.ray.payload import KEY, RunPayload, training_stream, validation_tasks
from ajet.schema.task import Task

SPARE = 4
"""Times more items than the steps need: replaced groups take some, and the end must never be reached."""


class TaskDataset(Dataset[dict[str, Any]]):
    """Built by verl, once for training and once for validation (`data_files`)."""

    def __init__(self, data_files: str, tokenizer: Any, processor: Any, config: Any, max_samples: int = -1) -> None:
        run = RunPayload.decode(config[KEY])
        run.enter()
        loaded = run.load_config()
        self._training = data_files == "training"
        if self._training:
            self._stream = training_stream(loaded)
            self._length = run.total_steps * loaded.ajet.data.train_batch_size * SPARE
        else:
            # without validation tasks nothing is validated, but verl's loader must hold something
            self._tasks = validation_tasks(loaded) or training_stream(loaded).tasks[:1]
            self._length = len(self._tasks)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self._training:
            return item_of(self._tasks[index], index)
        return item_of(self._stream.task_at(index), index, self._stream.occurrence_at(index))


def item_of(task: Task, index: int, occurrence: int = 0) -> dict[str, Any]:
    """A task as verl carries it; all but ours (`ajet_…`) is for verl's own bookkeeping.

    `occurrence` tells apart the groups of one task in a step.
    """
    return {
        "ajet_task": task.model_dump_json(),
        "ajet_occurrence": occurrence,
        "index": index,
        "raw_prompt": task.init_messages or [{"role": "user", "content": task.main_query or ""}],
        "data_source": "ajet",
        "reward_model": {"ground_truth": None},
    }
