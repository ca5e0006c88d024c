"""`data_generation`: tasks that a helper model writes from documents and example tasks.

They are kept in the experiment folder, by all that they depend on: documents, examples, prompts, model, chunking, seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from ajet.config.tasks import HuggingFaceConfig, JsonlConfig, TaskReaderConfig
from ajet.schema.errors import TaskDataError
from ajet.schema.task import Task
from ajet.task_judge.helper import AnswerCache, Asker, HelperModel
from ajet.task_reader.documents import Chunk, chunks_of, read_documents
from ajet.task_reader.generation import PROMPTS, TaskWriter, WritingSettings, Written
from ajet.task_reader.review import QUESTION
from ajet.task_reader.task_reader_base import BaseTaskReader, with_unique_ids

log = logging.getLogger("ajet.task_reader")

KEY = "ajet.task_reader.data_generation"
FORMAT = 1
"""Of what is kept; a change makes earlier files unused."""


class DataGenerationReader(BaseTaskReader):
    """`ajet.task_reader.data_generation`."""

    def __init__(self, reader_config: TaskReaderConfig) -> None:
        super().__init__(reader_config)
        self._written: Written | None = None

    def get_training_tasks(self) -> list[Task]:
        return self.written().training

    def get_validation_tasks(self) -> list[Task]:
        return self.written().validation

    def written(self) -> Written:
        """All tasks: those kept earlier, or new ones."""
        if self._written is None:
            self._written = self._load_or_write()
        return self._written

    def _load_or_write(self) -> Written:
        section = self.reader_config.data_generation
        reader = section.document_reader
        documents = read_documents(reader.document_path, self.config.base_dirs)
        chunks = [chunk for document in documents for chunk in chunks_of(document, reader.chunk_size, reader.split_by)]
        seeds = self._seeds()
        if not chunks and not seeds:
            raise TaskDataError(
                f"{KEY}: nothing to write tasks from: name documents in document_reader.document_path, example tasks "
                "in query_reader, or both"
            )
        helper = HelperModel.chosen(self.config, section.llm_model, f"{KEY}.llm_model")
        filter_ = section.deduplication_filter
        settings = WritingSettings(
            count=section.task_num,
            seed=self.reader_config.seed,
            threshold=filter_.params.similarity_threshold,
            deduplicate=filter_.enabled,
            check=section.llm_filter,
            temperature=section.sampling_params.temperature,
            max_tokens=section.llm_response_length,
        )
        kept = self.config.cache_path / f"generated_{_key(helper.model, settings, chunks, seeds)}.jsonl"
        if reader.cache_enabled and kept.is_file():
            return _load(kept)
        helper.endpoint()
        cache = AnswerCache(self.config.cache_path / "helper_answers.sqlite") if reader.cache_enabled else None
        asker = Asker(helper, cache=cache, max_concurrent=section.num_workers)

        def spent() -> str:
            budget = helper.budget
            cost = f", cost {budget.cost:.4g}" if budget.cost else ""
            return f"{budget.calls} calls, {asker.cached} from the cache, {budget.tokens:,} tokens{cost}"

        log.info("writing %d tasks from %d documents (%d chunks)", section.task_num, len(documents), len(chunks))
        writing = TaskWriter(asker, settings, spent).write(chunks, seeds)
        written = asyncio.run_coroutine_threadsafe(writing, helper.loop()).result()
        if reader.cache_enabled:
            _save(kept, written)
        return written

    def _seeds(self) -> list[Task]:
        from ajet.task_reader.registry import build_reader

        query = self.reader_config.data_generation.query_reader
        files, hub = query.dataset_file or query.jsonl_dataset_file, query.huggingface_dat_repo
        from_hub = query.type == "huggingface_dat_repo"
        if (hub.dataset_path if from_hub else files.training.file_path) is None:
            return []
        section = self.reader_config.model_copy(
            update={
                "type": "huggingface_dat_repo" if from_hub else "jsonl_dataset_file",
                "jsonl_dataset_file": JsonlConfig(training=files.training),
                "huggingface_dat_repo": HuggingFaceConfig(
                    dataset_path=hub.dataset_path, dataset_name=hub.dataset_name, training_split=hub.training_split
                ),
            }
        )
        config = self.config.model_copy(update={"ajet": self.config.ajet.model_copy(update={"task_reader": section})})
        tasks, _ = with_unique_ids(build_reader(config).get_training_tasks())
        return tasks


def _key(model: str, settings: WritingSettings, chunks: list[Chunk], seeds: list[Task]) -> str:
    said: list[Any] = [FORMAT, PROMPTS, QUESTION, model, repr(settings)]
    said += [[chunk.source, chunk.start, chunk.text] for chunk in chunks]
    said += [task.model_dump(mode="json") for task in seeds]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _save(path: Path, written: Written) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"split": split, "task": task.model_dump(mode="json")}, ensure_ascii=True)
        for split, tasks in (("training", written.training), ("validation", written.validation))
        for task in tasks
    ]
    scratch = path.with_suffix(".tmp")
    scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
    scratch.replace(path)


def _load(path: Path) -> Written:
    written = Written([], [])
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            task = Task.model_validate(record["task"])
            (written.training if record["split"] == "training" else written.validation).append(task)
        except (ValueError, KeyError, TypeError) as error:
            raise TaskDataError(f"{path}:{number}: damaged: {error}. Delete the file to have it written anew") from None
    log.info("%d training and %d validation tasks from %s", len(written.training), len(written.validation), path)
    return written
