"""`BaseTaskReader`: where tasks come from, and `build_reader`, which makes the one that a config names."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from typing import Any

from ajet.config import Config
from ajet.config.kinds import READERS, load
from ajet.config.tasks import FieldsConfig, TaskReaderConfig
from ajet.schema.errors import TaskDataError
from ajet.schema.printable import encodable
from ajet.schema.task import Task
from ajet.schema.user_code import import_class

log = logging.getLogger("ajet.task_reader")


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

    def take(candidates: list[str]) -> Any:
        present = next((name for name in candidates if rest.get(name) is not None), None)
        return None if present is None else rest.pop(present)

    query, messages = take(fields.main_query), take(fields.init_messages)
    if isinstance(query, list):  # data sets in chat format have messages where others have text
        query, messages = None, messages or query
    messages = _messages(messages)
    if query is None:
        query = next((m["content"] for m in reversed(messages) if isinstance(m.get("content"), str)), None)
    if query is None and not query_needed:
        query = ""
    if query is None:
        raise BadRecord(
            f"no field {' / '.join(fields.main_query)} (fields here: {', '.join(map(str, record)) or 'none'}); "
            "name yours in ajet.task_reader.fields.main_query"
        )
    if not isinstance(query, str):
        raise BadRecord(f"the problem should be text, found {_kind(query)}")
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
    unique: list[Task] = []
    for task in named:
        task_id = task.task_id
        if task_id in seen:
            repeated.append(task_id)
            number = 2
            while f"{task_id}-{number}" in taken:
                number += 1
            task_id = f"{task_id}-{number}"
            taken.add(task_id)
            task = task.model_copy(update={"task_id": task_id})
        seen.add(task_id)
        unique.append(task)
    notes = []
    if missing:
        notes.append(f"{missing} of {len(tasks)} tasks have no id and got one computed from their content")
    if repeated:
        notes.append(f"{len(repeated)} tasks repeat an id (first: {repeated[0]!r}) and got a number appended")
    return unique, "; ".join(notes) or None


def require_tasks(tasks: Any, reader: str) -> list[Task]:
    """Validate the tasks that a reader returned."""
    listed = list(tasks) if not isinstance(tasks, str | bytes | dict) and hasattr(tasks, "__iter__") else None
    if listed is None or not all(isinstance(task, Task) for task in listed):
        wrong = tasks if listed is None else next(task for task in listed if not isinstance(task, Task))
        raise TaskDataError(f"{reader} should return a list of ajet.Task, but returned {type(wrong).__name__}")
    for number, task in enumerate(listed, start=1):
        for field in ("task_id", "env_type", "main_query"):
            if encodable(text := getattr(task, field)) != text:
                raise TaskDataError(
                    f"{reader}: the {field} of task {number} has half of a surrogate pair, which is not a character: "
                    f"{encodable(text)[:80]!r}"
                )
    return listed


def build_reader(config: Config) -> BaseTaskReader:
    """The reader named by `task_reader.type`, possibly the user's own."""
    kind = config.ajet.task_reader.type
    if kind in READERS:
        reader_class = load(READERS, kind)
    else:
        reader_class = import_class(kind, BaseTaskReader, key="ajet.task_reader.type", base_dirs=config.base_dirs)
    reader = reader_class(config.ajet.task_reader)
    assert isinstance(reader, BaseTaskReader)
    reader.config = config
    return reader


def read_training_tasks(reader: BaseTaskReader) -> list[Task]:
    """The training tasks in the source's order, each with a unique id."""
    return _checked(reader.get_training_tasks(), f"{type(reader).__name__}.get_training_tasks()", "training")


def read_validation_tasks(reader: BaseTaskReader) -> list[Task]:
    """The validation tasks in the source's order, each with a unique id."""
    return _checked(reader.get_validation_tasks(), f"{type(reader).__name__}.get_validation_tasks()", "validation")


def _checked(tasks: object, where: str, split: str) -> list[Task]:
    unique, note = with_unique_ids(require_tasks(tasks, where))
    if note:
        log.info("%s tasks: %s", split, note)
    return unique
