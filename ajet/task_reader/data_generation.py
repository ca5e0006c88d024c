"""`data_generation`: a helper model writes tasks from documents and example tasks. First it writes questions about the
documents, which become the validation tasks; then variations of these and of the examples, which become the training
tasks. The seed decides which document and which example a task comes from. All answers of the model are cached by
content, so an interrupted run continues where it stopped. The tasks are stored in the experiment folder, under a digest
of everything they depend on: documents, examples, prompts, model, chunking, seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ajet.config.kinds import READERS, load
from ajet.config.tasks import HuggingFaceConfig, JsonlConfig, TaskReaderConfig
from ajet.schema.errors import TaskDataError
from ajet.schema.files import write_whole
from ajet.schema.task import Task
from ajet.task_judge.helper import Asker, HelperModel, HelperRefusalError, UnusableAnswerError
from ajet.task_judge.helper_answers import NearDuplicates, read_json
from ajet.task_reader.documents import Chunk, chunks_of, read_documents
from ajet.task_reader.quality import QUESTION, review
from ajet.task_reader.task_reader_base import BaseTaskReader, with_unique_ids

log = logging.getLogger("ajet.task_reader")

KEY = "ajet.task_reader.data_generation"
PER_CALL = 10
"""How many questions one call asks for."""
ROUNDS = 3
"""How many rounds replace variations that were rejected."""

QUESTIONS = """\
Read this text and write exactly {count} questions about it. They should differ, cover all of the text, be clear \
without it, and each have one short answer that the text gives.

<text>
{text}
</text>

Write in the language of the text. Answer with a JSON list and nothing after it, one object per question:
[{{"query": "…", "answer": "…", "related_doc": "the passage that gives the answer, word for word"}}]
"""
VARIATION = """\
Write one new task in the manner of this one: the same style, language, kind and rough length, but another problem, \
whose answer is another one. Don't merely exchange words or numbers.

<task>
{query}
</task>

<answer>
{answer}
</answer>
{document}
The new task should be number {number} of many that all differ. It must be clear by itself and have one short answer.
Answer with a JSON object and nothing after it: {{"query": "…", "answer": "…"}}
"""
DOCUMENT = """
It must be about this text, which gives its answer:

<text>
{text}
</text>
"""
TEXT = {"type": "string", "minLength": 1}
ONE = {"type": "object", "properties": {"query": TEXT, "answer": TEXT}, "required": ["query", "answer"]}
MANY = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"query": TEXT, "answer": TEXT, "related_doc": TEXT},
        "required": ["query", "answer", "related_doc"],
    },
    "minItems": 1,
}
PROMPTS = QUESTIONS + VARIATION + DOCUMENT


REPEATED, LEAKED, REJECTED = "repetitions", "that repeated a validation task", "rejected by the review"
UNUSABLE, REFUSED = "unusable answers", "refused questions"


@dataclass(slots=True)
class Written:
    """The tasks that were kept, and counts of what wasn't."""

    training: list[Task]
    validation: list[Task]
    left_out: Counter[str] = field(default_factory=Counter)


class TaskWriter:
    def __init__(self, asker: Asker, reader: TaskReaderConfig, embedder: Asker | None) -> None:
        self._embed = None if embedder is None else embedder.vectors
        self._asker, self._seed, self._section = asker, reader.seed, reader.data_generation
        self._left_out: Counter[str] = Counter()
        self._last_refusal = ""

    async def write(self, chunks: Sequence[Chunk], seeds: Sequence[Task]) -> Written:
        """Tasks to train and to validate on."""
        written = Written([], [], self._left_out)
        duplicates = self._section.deduplication_filter
        threshold = duplicates.params.similarity_threshold
        known = NearDuplicates(threshold, self._embed) if duplicates.enabled else NearDuplicates(1.0)
        await known.learn(seed.main_query for seed in seeds)
        for seed in seeds:
            known.add(seed.main_query)
        asked = await self._questions(chunks) if chunks else []
        questions = await self._kept(asked, known)
        written.validation = [*questions, *seeds]
        sources = written.validation
        if not sources:
            raise TaskDataError(
                f"{KEY}: the model wrote no usable question about the documents ({self._why()}): see the log"
            )
        guard = NearDuplicates(threshold, self._embed)
        await guard.learn(task.main_query for task in sources)
        for task in sources:
            guard.add(task.main_query)
        number = 0
        for _ in range(ROUNDS):
            missing = self._section.task_num - len(written.training)
            if missing <= 0:
                break
            fresh = await self._variations(range(number, number + missing), sources, chunks)
            number += missing
            await guard.learn(task.main_query for task in fresh)
            clean = [task for task in fresh if guard.find(task.main_query) is None]
            self._left_out[LEAKED] += len(fresh) - len(clean)
            written.training += await self._kept(clean, known)
        if not written.training:
            raise TaskDataError(f"{KEY}: no training task was left: {self._why()}")
        log.info(
            "tasks written: %d to train on, %d to validate on; left out: %s; %s",
            *(len(written.training), len(written.validation), self._why(), self._asker.spent),
        )
        return written

    async def _questions(self, chunks: Sequence[Chunk]) -> list[Task]:
        calls = -(-self._section.task_num // PER_CALL)
        asked = await self._asker.all(
            [self._ask_about(chunks[index % len(chunks)], index) for index in range(calls)], "writing questions"
        )
        return [task for tasks in asked for task in tasks]

    async def _ask_about(self, chunk: Chunk, number: int) -> list[Task]:
        question = QUESTIONS.format(count=PER_CALL, text=chunk.text)
        records = await self._ask(question, MANY, number, chunk)
        tasks = []
        for record in records or []:
            place = _place(record["related_doc"], chunk)
            if place is None:
                log.info("left out, its passage is not in %s: %.80r", chunk.source, record["query"])
                continue
            metadata = {
                "answer": record["answer"],
                "related_doc": record["related_doc"],
                "related_doc_source": chunk.source,
                "place": {"chunk": chunk.index, "start": place[0], "end": place[1]},
            }
            tasks.append(_task(record["query"], metadata))
        return tasks

    async def _variations(self, numbers: Sequence[int], sources: Sequence[Task], chunks: Sequence[Chunk]) -> list[Task]:
        made = await self._asker.all([self._vary(number, sources, chunks) for number in numbers], "writing tasks")
        return [task for task in made if task is not None]

    async def _vary(self, number: int, sources: Sequence[Task], chunks: Sequence[Chunk]) -> Task | None:
        draw = random.Random(f"{self._seed}:{number}")
        source, chunk = draw.choice(sources), draw.choice(chunks) if chunks else None
        question = VARIATION.format(
            query=source.main_query,
            answer=source.metadata.get("answer", "(not given)"),
            document=DOCUMENT.format(text=chunk.text) if chunk else "",
            number=number + 1,
        )
        record = await self._ask(question, ONE, number, chunk)
        if record is None:
            return None
        metadata: dict[str, Any] = {
            "answer": record["answer"], "aug_type": "task_augmentation", "source_task_id": source.task_id,
        }  # fmt: skip
        if chunk is not None:
            end = chunk.start + len(chunk.text)
            metadata |= {
                "source_doc_id": chunk.source,
                "place": {"chunk": chunk.index, "start": chunk.start, "end": end},
            }
        return _task(record["query"], metadata)

    async def _ask(self, question: str, schema: dict[str, Any], draw: int, about: Chunk | None) -> Any:
        """The model's answer, or None if it can't be used or its server refuses the question. An unreachable model is
        an error."""
        try:
            return await self._asker.ask(
                [{"role": "user", "content": question}],
                lambda text: read_json(text, schema),
                draw=draw,
                temperature=self._section.sampling_params.temperature,
                max_tokens=self._section.llm_response_length,
            )
        except UnusableAnswerError as error:
            self._left_out[UNUSABLE] += 1
            log.warning("%s", error)
            return None
        except HelperRefusalError as error:
            self._left_out[REFUSED] += 1
            self._last_refusal = f", the last refusal: {error}"
            log.warning("left out, refused: a question%s: %s", f" about {about.source}" if about else "", error)
            return None

    def _why(self) -> str:
        counted = ", ".join(f"{count} {what}" for what, count in self._left_out.items() if count)
        return f"{counted or 'nothing'}{self._last_refusal}"

    async def _kept(self, tasks: Sequence[Task], known: NearDuplicates) -> list[Task]:
        """The tasks that repeat no other task and pass the review."""
        await known.learn(task.main_query for task in tasks)
        new = [task for task in tasks if known.add(task.main_query) is None]
        self._left_out[REPEATED] += len(tasks) - len(new)
        if not self._section.llm_filter or not new:
            return new
        good = await review(new, self._asker)
        self._left_out[REJECTED] += len(new) - len(good)
        return good


def _task(query: str, metadata: dict[str, Any]) -> Task:
    name = hashlib.sha256(query.encode(errors="surrogatepass")).hexdigest()[:12]
    return Task(main_query=query.strip(), task_id=f"gen-{name}", metadata=metadata)


def _place(passage: str, chunk: Chunk) -> tuple[int, int] | None:
    """The position of a passage in the document, or None if the chunk doesn't contain it. Differences in white space
    don't matter."""
    pattern = r"\s+".join(re.escape(word) for word in passage.split())
    found = re.search(pattern, chunk.text) if pattern else None
    return None if found is None else (chunk.start + found.start(), chunk.start + found.end())


FORMAT = 1
"""The version of stored files. Changing it makes earlier files obsolete."""


class DataGenerationReader(BaseTaskReader):
    """`ajet.task_reader.data_generation`."""

    def get_training_tasks(self) -> list[Task]:
        return self.written.training

    def get_validation_tasks(self) -> list[Task]:
        return self.written.validation

    @cached_property
    def written(self) -> Written:
        """All tasks: loaded from an earlier run, or newly written."""
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
        embedding = self.config.ajet.helper.embedding_model
        key = _key(helper.model, embedding, self.reader_config, chunks, seeds)
        kept = self.config.cache_path / f"generated_{key}.jsonl"
        if reader.cache_enabled and kept.is_file():
            return _load(kept)
        asker = Asker.of_run(self.config, helper, max_concurrent=section.num_workers, cache=reader.cache_enabled)
        vectors = HelperModel.for_embeddings(self.config)
        embedder = None if vectors is None else Asker(vectors, cache=asker.cache)
        log.info("writing %d tasks from %d documents (%d chunks)", section.task_num, len(documents), len(chunks))
        writing = TaskWriter(asker, self.reader_config, embedder).write(chunks, seeds)
        written = asyncio.run_coroutine_threadsafe(writing, helper.loop()).result()
        if reader.cache_enabled:
            _save(kept, written)
        return written

    def _seeds(self) -> list[Task]:
        query = self.reader_config.data_generation.query_reader
        files, hub = query.jsonl_dataset_file, query.huggingface_dat_repo
        if (hub.dataset_path if query.type == "huggingface_dat_repo" else files.training.file_path) is None:
            return []
        section = self.reader_config.model_copy(
            update={
                "type": query.type,
                "jsonl_dataset_file": JsonlConfig(training=files.training),
                "huggingface_dat_repo": HuggingFaceConfig(**hub.model_dump()),
            }
        )
        reader = load(READERS, section.type)(section)
        reader.config = self.config
        tasks, _ = with_unique_ids(reader.get_training_tasks())
        return tasks


def _key(model: str, embedding: str | None, reader: TaskReaderConfig, chunks: list[Chunk], seeds: list[Task]) -> str:
    section = reader.data_generation
    duplicates, sampling = section.deduplication_filter, section.sampling_params
    said: list[Any] = [FORMAT, PROMPTS, QUESTION, model, reader.seed, section.task_num, section.llm_filter]
    said += [sampling.temperature, section.llm_response_length]
    said += [duplicates.enabled, duplicates.params.similarity_threshold, *([embedding] if embedding else [])]
    said += [[chunk.source, chunk.start, chunk.text] for chunk in chunks]
    said += [task.model_dump(mode="json") for task in seeds]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _save(path: Path, written: Written) -> None:
    lines = [
        json.dumps({"split": split, "task": task.model_dump(mode="json")}, ensure_ascii=True)
        for split, tasks in (("training", written.training), ("validation", written.validation))
        for task in tasks
    ]
    write_whole(path, "\n".join(lines) + "\n")


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
