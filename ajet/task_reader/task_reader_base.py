"""`BaseTaskReader`: where tasks come from, and `build_reader`, which makes the one that a config names.

`TaskStream` hands its tasks out, epoch after epoch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ajet.config import Config
from ajet.config.kinds import READERS, load
from ajet.config.tasks import FieldsConfig, TaskReaderConfig
from ajet.schema.chat import plain_text
from ajet.schema.errors import TaskDataError, UserError, at_user_line
from ajet.schema.printable import encodable
from ajet.schema.task import Task
from ajet.schema.user_code import built, find_named, import_class, looked_in

log = logging.getLogger("ajet.task_reader")


TYPE = "ajet.task_reader.type"


class BaseTaskReader(ABC):
    """Built with the YAML's `ajet.task_reader` section. Each of its two lists is requested once."""

    config: Config
    """The whole configuration, for readers that use a helper model or a cache. It is set before a list is requested."""

    def __init__(self, reader_config: TaskReaderConfig) -> None:
        self.reader_config = reader_config

    @abstractmethod
    def get_training_tasks(self) -> list[Task]:
        """The tasks to train on, in the source's order."""

    def get_validation_tasks(self) -> list[Task]:
        """The tasks to validate on; none if the source has none."""
        return []


class BadRecord(ValueError):
    """A record that can't become a task. The reader adds its location."""


def task_from_record(record: Any, fields: FieldsConfig, *, query_needed: bool = True) -> Task:
    """Convert a data set's record to a task: known fields by name, everything else as metadata. With
    `query_needed=False`, a record without a problem text gets an empty one."""
    if not isinstance(record, dict):
        raise BadRecord(f"expected an object with fields, found {_kind(record)}")
    rest = dict(record)

    def named(candidates: list[str]) -> str | None:
        return next((name for name in candidates if rest.get(name) is not None), None)

    def take(candidates: list[str]) -> Any:
        present = named(candidates)
        return None if present is None else rest.pop(present)

    query_field = named(fields.main_query)
    query, messages = take(fields.main_query), take(fields.init_messages)
    if isinstance(query, list):  # data sets in chat format have messages where others have text
        query, messages = None, messages or query
    messages = _messages(messages)
    if query is None:
        said = [message for message in messages if plain_text(message.get("content")).strip()]
        asked = [message for message in said if message["role"] == "user"] or said
        query = plain_text(asked[-1]["content"]) if asked else None
    if query is None and not query_needed:
        query = ""
    if query is None:
        raise BadRecord(
            f"no field {' / '.join(fields.main_query)} (fields here: {', '.join(map(str, record)) or 'none'}); "
            "name yours in ajet.task_reader.fields.main_query"
        )
    if not isinstance(query, str):
        raise BadRecord(
            f"{query_field!r} should be text, found {_kind(query)}; put it in quotes, or name another field in "
            "ajet.task_reader.fields.main_query"
        )
    task_id, env_type, tag = take(fields.task_id), take(fields.env_type), take(fields.tag)
    metadata = rest.pop("metadata", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise BadRecord(f"metadata should be an object, found {_kind(metadata)}")
    metadata = {**rest, **(metadata or {})}
    if tag is not None:
        metadata["tag"] = str(tag)
    return Task(
        main_query=query,
        init_messages=messages,
        task_id="" if task_id is None else str(task_id),
        env_type="" if env_type is None else str(env_type),
        metadata=metadata,
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not (isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value)):
        raise BadRecord('messages should be a list of objects such as {"role": "user", "content": "…"}')
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def content_id(task: Task) -> str:
    """An id computed from a task's content, the same in every run and on every machine."""
    said = json.dumps(
        [task.main_query, task.init_messages, task.env_type, task.metadata],
        sort_keys=True,
        ensure_ascii=False,
        default=repr,
    )
    return "task-" + hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:12]


def with_unique_ids(tasks: list[Task]) -> tuple[list[Task], str | None]:
    """The tasks with unique ids, and a sentence about the ids that had to be changed."""
    missing = sum(not task.task_id for task in tasks)
    named = [task if task.task_id else task.model_copy(update={"task_id": content_id(task)}) for task in tasks]
    taken = {task.task_id for task in named}
    seen: set[str] = set()
    repeated: list[str] = []
    numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(2))
    unique: list[Task] = []
    for task in named:
        task_id = task.task_id
        if task_id in seen:
            repeated.append(task_id)
            task_id = next(new for n in numbers[task_id] if (new := f"{task.task_id}-{n}") not in taken)
            taken.add(task_id)
            task = task.model_copy(update={"task_id": task_id})
        seen.add(task_id)
        unique.append(task)
    notes = []
    if missing:
        notes.append(f"{missing} of {len(tasks)} tasks have no id and got one computed from their content")
    if repeated:
        count_of = f"{len(repeated)} of {len(tasks)}"
        notes.append(f"{count_of} tasks repeat an id (first: {repeated[0]!r}) and got a number appended")
    return unique, "; ".join(notes) or None


def require_tasks(tasks: Any, reader: str) -> list[Task]:
    """Validate the tasks that a reader returned."""
    listed = list(tasks) if not isinstance(tasks, str | bytes | dict | Task) and hasattr(tasks, "__iter__") else None
    if listed is None or not all(isinstance(task, Task) for task in listed):
        wrong = tasks if listed is None else next(task for task in listed if not isinstance(task, Task))
        raise TaskDataError(f"{reader} should return a list of ajet.Task, but returned {type(wrong).__name__}")
    for number, task in enumerate(listed, start=1):
        for field in ("task_id", "env_type", "main_query"):
            if not isinstance(text := getattr(task, field), str):
                raise TaskDataError(f"{reader}: the {field} of task {number} should be text, not {text!r:.80}")
            if encodable(text) != text:
                raise TaskDataError(
                    f"{reader}: the {field} of task {number} has half of a surrogate pair, which is not a character: "
                    f"{encodable(text)[:80]!r}"
                )
    return listed


def found_place(given: str, base_dirs: Sequence[Path], key: str) -> Path:
    """The file or folder that a YAML's `key` names. Raises TaskDataError."""
    if (found := find_named(given, base_dirs)) is not None:
        return found
    raise TaskDataError(f"{key}: no file or folder {given!r}\n    looked in {looked_in(given, base_dirs)}")


def build_reader(config: Config) -> BaseTaskReader:
    """The reader named by `task_reader.type`, possibly the user's own."""
    kind = config.ajet.task_reader.type
    if kind in READERS:
        reader_class = load(READERS, kind)
    else:
        reader_class = import_class(kind, BaseTaskReader, key=TYPE, base_dirs=config.base_dirs)
    reader = built(reader_class, TYPE, "reader_config", config.ajet.task_reader)
    assert isinstance(reader, BaseTaskReader)
    reader.config = config
    return reader


def read_training_tasks(reader: BaseTaskReader) -> list[Task]:
    """The training tasks in the source's order, each with a unique id. There is at least one."""
    where = f"{type(reader).__name__}.get_training_tasks()"
    tasks = _checked(reader.get_training_tasks, where, "training")
    if not tasks:
        raise TaskDataError(f"{where} returned no tasks, so there is nothing to run: see ajet.task_reader")
    return tasks


def read_validation_tasks(reader: BaseTaskReader) -> list[Task]:
    """The validation tasks in the source's order, each with a unique id."""
    return _checked(reader.get_validation_tasks, f"{type(reader).__name__}.get_validation_tasks()", "validation")


def _checked(read: Callable[[], object], where: str, split: str) -> list[Task]:
    try:
        tasks = require_tasks(read(), where)
    except UserError:
        raise
    except Exception as error:
        if not (line := at_user_line(traceback.format_exc())):
            raise
        found = error.errors(include_url=False) if isinstance(error, ValidationError) else []
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found) or str(error)
        raise TaskDataError(f"{where} raised {type(error).__name__}: {' '.join(said.split())[:300]}{line}") from error
    unique, note = with_unique_ids(tasks)
    if note:
        log.info("%s tasks: %s", split, note)
    if answered := sum(task.init_messages[-1].get("role") == "assistant" for task in unique if task.init_messages):
        log.warning(
            "%d of %d %s tasks have messages that end with the assistant's, so the model is shown that answer: leave "
            "it out of them",
            *(answered, len(unique), split),
        )
    return unique


class TaskStream:
    """An endless stream of batches of `batch_size` tasks. Each epoch is shuffled by (seed, epoch). A batch may span two
    epochs, so no task is left out. The position counts tasks, so a run may resume with another batch size.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, batch_size: int, shuffle: bool = True) -> None:
        if not tasks:
            raise ValueError("a stream needs at least one task")
        self.tasks = list(tasks)
        self.seed = seed
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.position = 0
        """How many tasks have been handed out so far."""
        self._order: tuple[int, list[int]] = (-1, [])

    def next_batch(self) -> list[Task]:
        batch = [self.task_at(self.position + offset) for offset in range(self.batch_size)]
        self.position += self.batch_size
        return batch

    @property
    def epoch(self) -> float:
        """How many epochs have been handed out so far, as a fraction."""
        return self.position / len(self.tasks)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seed": self.seed, "tasks": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["tasks"] != self._fingerprint() or state["seed"] != self.seed:
            log.warning(
                "the training tasks or ajet.task_reader.seed changed since the checkpoint: the task order is new"
            )
        self.position = int(state["position"])

    def occurrence_at(self, position: int) -> int:
        """How many groups of the same task precede this one in its batch. Each group samples different replies."""
        begin = position - position % self.batch_size
        mine = self.task_at(position).task_id
        return sum(self.task_at(earlier).task_id == mine for earlier in range(begin, position))

    def task_at(self, position: int) -> Task:
        """The task at a position of the endless stream."""
        epoch, index = divmod(position, len(self.tasks))
        if self._order[0] != epoch:
            order = list(range(len(self.tasks)))
            if self.shuffle:
                # seeded with text: the order is then the same in every Python version and process
                random.Random(f"{self.seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.tasks[self._order[1][index]]

    def _fingerprint(self) -> str:
        ids = "\n".join(task.task_id for task in self.tasks)
        return hashlib.sha256(ids.encode(errors="surrogatepass")).hexdigest()[:16]


class Curriculum(TaskStream):
    """A stream that records how its tasks ended. Its choice depends on the seed, the position and the solve rates."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, batch_size: int, explore: float, memory: float) -> None:
        super().__init__(tasks, seed=seed, batch_size=batch_size)
        self.explore = explore
        self.memory = memory
        self._record: dict[str, tuple[float, float]] = {}
        """By task id: successes and tries. Both decay by the factor `memory` whenever new ones are added."""

    def note(self, task_id: str, successes: int, tries: int) -> None:
        if tries:
            earlier, tried = self._record.get(task_id, (0.0, 0.0))
            self._record[task_id] = (self.memory * earlier + successes, self.memory * tried + tries)

    def solve_rate(self, task_id: str) -> float | None:
        """The task's recent solve rate; None if it was never tried."""
        found = self._record.get(task_id)
        return None if found is None else found[0] / found[1]

    def probabilities(self) -> list[float]:
        """The probability of each task, in the order of `tasks`, to be the first of the next batch."""
        rates = [self.solve_rate(task.task_id) for task in self.tasks]
        weights = [1.0 if rate is None else 4.0 * rate * (1.0 - rate) for rate in rates]
        total = sum(weights)
        if total == 0.0:  # every task is always or never solved
            return [1.0 / len(rates)] * len(rates)
        return [(1.0 - self.explore) * weight / total + self.explore / len(rates) for weight in weights]

    def next_batch(self) -> list[Task]:
        """The next `batch_size` tasks. No task occurs twice before all have occurred once."""
        rng = random.Random(f"{self.seed}:curriculum:{self.position}")
        probabilities = self.probabilities()
        batch: list[Task] = []
        while len(batch) < self.batch_size:
            # the first to ring, if each task's clock rings at the rate of its probability
            rings = [-math.log(1.0 - rng.random()) / p if p else math.inf for p in probabilities]
            order = sorted(range(len(self.tasks)), key=lambda index: (rings[index], index))
            batch += [self.tasks[index] for index in order[: self.batch_size - len(batch)]]
        self.position += self.batch_size
        return batch

    def metrics(self) -> dict[str, float]:
        known = [rate for task in self.tasks if (rate := self.solve_rate(task.task_id)) is not None]
        count = len(self.tasks)
        return {
            "curriculum/tried": len(known) / count,
            "curriculum/always_solved": sum(rate == 1.0 for rate in known) / count,
            "curriculum/never_solved": sum(rate == 0.0 for rate in known) / count,
        }

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"solved": {name: list(record) for name, record in self._record.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume. A run without a curriculum has no record; records of removed tasks are dropped."""
        super().load_state_dict(state)
        present = {task.task_id for task in self.tasks}
        stored = state.get("solved", {})
        self._record = {name: (record[0], record[1]) for name, record in stored.items() if name in present}
