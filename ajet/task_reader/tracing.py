"""`tracing`: tasks from what agents were asked in production. Which side of the split a task is on depends on its text
alone, so it never changes when traces are added.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from ajet.config.tasks import TaskReaderConfig, TraceFilterConfig
from ajet.schema.errors import TaskDataError
from ajet.schema.named_files import find_named, looked_in
from ajet.schema.task import Task
from ajet.task_judge.helper import AnswerCache, Asker, HelperModel, NearDuplicates
from ajet.task_reader.review import review
from ajet.task_reader.task_reader_base import BaseTaskReader
from ajet.task_reader.traces import KEY, Exchange, exchanges

log = logging.getLogger("ajet.task_reader")

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
MARKED = re.compile(r"####\s*(\S[^\n]*)")


class TracingReader(BaseTaskReader):
    """`ajet.task_reader.tracing`."""

    def __init__(self, reader_config: TaskReaderConfig) -> None:
        super().__init__(reader_config)
        self._accepted: list[Task] | None = None

    def get_training_tasks(self) -> list[Task]:
        tasks = [task for task in self.accepted() if not self._validates(task)]
        if not tasks:
            raise TaskDataError(
                f"{KEY}: all {len(self.accepted())} tasks are on the validation side: add traces, or lower "
                "ajet.task_reader.tracing.validation_share"
            )
        return tasks

    def get_validation_tasks(self) -> list[Task]:
        return [task for task in self.accepted() if self._validates(task)]

    def accepted(self) -> list[Task]:
        """All tasks that passed the filters, in the order of the traces."""
        if self._accepted is None:
            self._accepted = self._read()
        return self._accepted

    def _validates(self, task: Task) -> bool:
        share = int(_hash(task.main_query)[:12], 16) / 16**12
        return share < self.reader_config.tracing.validation_share

    def _read(self) -> list[Task]:
        section = self.reader_config.tracing
        if not section.base_url:
            raise TaskDataError(f"{KEY} is missing: name a trace file or a folder of them")
        known = _known(Path(section.train_output_path)) if section.train_output_path else []
        seen = {task.metadata["qa_hash"] for task in known}
        queries = {task.main_query for task in known}
        fresh: list[Task] = []
        repeated = 0
        for place in section.base_url:
            for exchange in exchanges(self._there(place), section.min_reward):
                task = _task(exchange)
                if task.metadata["qa_hash"] in seen or task.main_query in queries:
                    repeated += 1
                    continue
                seen.add(task.metadata["qa_hash"])
                queries.add(task.main_query)
                fresh.append(task)
        found = len(fresh)
        for filter_ in section.filters:
            if filter_.enabled:
                fresh = self._filtered(fresh, known, filter_)
        tasks = [*known, *fresh]
        log.info(
            "traces: %d new tasks, %d kept by the filters, %d known before, %d repetitions",
            *(found, len(fresh), len(known), repeated),
        )
        if not tasks:
            raise TaskDataError(f"{KEY}: no task is left: {found} found in the traces, none kept by the filters")
        if section.train_output_path and fresh:
            _write(Path(section.train_output_path), tasks)
        return tasks

    def _filtered(self, tasks: list[Task], known: Sequence[Task], filter_: TraceFilterConfig) -> list[Task]:
        params = filter_.params
        if filter_.type == "deduplication":
            texts = NearDuplicates(params.similarity_threshold)
            for task in known:
                texts.add(task.main_query)
            return [task for task in tasks if texts.add(task.main_query) is None]
        section = self.reader_config.tracing
        helper = HelperModel.chosen(self.config, section.alien_llm_model, "ajet.task_reader.tracing.alien_llm_model")
        helper.endpoint()
        cache = AnswerCache(self.config.cache_path / "helper_answers.sqlite")
        asker = Asker(helper, cache=cache, max_concurrent=section.max_thread)
        reviewing = review(
            tasks,
            asker,
            rules=params.custom_rubrics,
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            tell=params.print_reason,
        )
        return asyncio.run_coroutine_threadsafe(reviewing, helper.loop()).result()

    def _there(self, given: str) -> Path:
        if (found := find_named(given, self.config.base_dirs)) is not None:
            return found
        raise TaskDataError(
            f"{KEY}: no file or folder {given!r}\n    looked in {looked_in(given, self.config.base_dirs)}"
        )


def _task(exchange: Exchange) -> Task:
    """`answer` is what a reference can be compared with: the marked result, if the reply marks one."""
    query, reply = exchange.query, exchange.reply
    boxed, marked = BOXED.findall(reply), MARKED.findall(reply)
    answer = boxed[-1] if boxed else marked[-1].strip() if marked else reply
    found = _hash(f"{query}\n{reply}")
    metadata = {"answer": answer, "reply": reply, "qa_hash": found, "trace": exchange.trace}
    return Task(main_query=query, task_id=f"trace-{_hash(query)[:12]}", env_type="no_env", metadata=metadata)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _known(path: Path) -> list[Task]:
    """The tasks accepted earlier."""
    if not path.exists():
        return []
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                task = Task.model_validate(json.loads(line))
                task.metadata["qa_hash"]
            except (ValueError, KeyError) as error:
                raise TaskDataError(f"{path}:{number}: not a task that this reader wrote: {error}") from None
            tasks.append(task)
    return tasks


def _write(path: Path, tasks: Sequence[Task]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_text("".join(f"{json.dumps(task.model_dump(mode='json'))}\n" for task in tasks), encoding="utf-8")
    scratch.replace(path)
