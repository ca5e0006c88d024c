"""`EpisodeRecorder`: writes episodes to `episodes.sqlite` on its own thread.

`record` returns at once with a future that is done when the episode is in the file: what was acknowledged survives even
if the process is killed. Episodes are written in batches, one transaction each.
"""

from __future__ import annotations

import errno
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from ajet.config.root import AjetConfig
from ajet.observe.episode_codec import (
    Annotation,
    CallCreditRecord,
    TokenBytes,
    encode_annotation,
    stored_form,
    token_bytes_of,
    write_trajectory,
)
from ajet.observe.episode_tables import (
    commit,
    delete_after,
    delete_oldest,
    insert_annotation,
    insert_episode,
    insert_task,
    open_for_writing,
    used_bytes,
)
from ajet.observe.export import OtlpExporter
from ajet.observe.logs import LOST, Masker
from ajet.schema.episode import Episode, EpisodeStatus, FloatArray
from ajet.schema.task import Task

logger = logging.getLogger(__name__)

_BATCH = 256
MOST_WAITING = 1_000
"""Episodes that wait in memory for room on the disk; further ones are lost."""
_GIB = 1024**3
_PRUNE_AT_ONCE = 8
_PRUNE_TO = 0.95
"""Beyond `max_gb`, the oldest episodes are deleted down to this share of it, so not every new one deletes another."""


class CallCreditLike(Protocol):
    """The credit of one call, as `ajet.trainer.credit` computes it."""

    @property
    def advantage(self) -> float: ...
    @property
    def weight(self) -> float: ...
    @property
    def entries(self) -> Sequence[tuple[float, float]]: ...


class EpisodeCreditLike(Protocol):
    """The credit of an episode's calls, in the order of its tree."""

    @property
    def calls(self) -> Sequence[CallCreditLike]: ...


@dataclass(slots=True)
class _Write:
    """One piece of work for the writer."""

    work: Callable[[sqlite3.Connection], bool]
    done: Future[bool]
    keep: bool = True
    """Tried again later if the file can't be written now."""


class EpisodeRecorder:
    """The one writer of an experiment's episodes. Any thread may call any method."""

    def __init__(
        self,
        path: Path,
        ajet: AjetConfig | None = None,
        *,
        masker: Masker | None = None,
        tokenizer: Any = None,
    ) -> None:
        """`ajet`: which episodes are kept, as what, and which collector gets all of them."""
        ajet = ajet or AjetConfig()
        self.path = path
        self._kept = ajet.recorder
        self._json_files = ajet.trainer_common.save_trajectory_as_json_file
        self._masker = masker or Masker()
        self._exporter: OtlpExporter | None = None
        if ajet.observe.otlp_endpoint is not None:
            self._exporter = OtlpExporter(ajet.observe.otlp_endpoint, ajet.experiment_name, ajet.project_name)
        self._token_bytes: TokenBytes | None = token_bytes_of(tokenizer) if tokenizer is not None else None
        self._new_tokens: set[int] = set()
        self._jobs: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        connection = open_for_writing(path, ajet.task_judge.success_threshold)  # raises here, not on its thread
        self._known_tokens = {row[0] for row in connection.execute("SELECT id FROM token")}
        self._thread = threading.Thread(target=self._run, args=(connection,), name="episode-recorder", daemon=True)
        self._thread.start()

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Store the bytes of each token id with the episodes, including ids seen before."""
        self._token_bytes = token_bytes_of(tokenizer)

    def keeps(self, episode: Episode, step: int) -> bool:
        """Whether the config keeps this episode."""
        if self._kept.keep == "every_n":
            return step % self._kept.every_n == 0
        return self._kept.keep == "all" or episode.status is not EpisodeStatus.COMPLETED

    def record(
        self,
        episode: Episode,
        step: int,
        credit: EpisodeCreditLike | None = None,
        *,
        validation: bool = False,
        trainer_logprobs: Sequence[FloatArray] | None = None,
        task: Task | None = None,
    ) -> Future[bool]:
        """Write an episode that is finished and won't change, and once what the reader gave of its task.

        The future is true once the episode is in the file, false if the config doesn't keep it. If it could not be
        written (the disk is full, for example), the future raises and the log says so.
        """
        query = task.main_query if task is not None else ""
        if self._exporter is not None:
            self._export(self._exporter, episode, step, validation, query)
        done: Future[bool] = Future()
        if not self.keeps(episode, step):
            done.set_result(False)
            return done
        annotation = _annotation(credit, trainer_logprobs)

        def write(connection: sqlite3.Connection) -> bool:
            self._mask(episode)
            stored, body = stored_form(episode)
            row = insert_episode(connection, stored, body, step, validation, query, time.time())
            if task is not None:
                masked = {"task_id": episode.task_id, "metadata": self._masker.value(task.metadata)}
                insert_task(connection, task.model_copy(update=masked))
            if annotation is not None:
                insert_annotation(connection, row, annotation, encode_annotation(annotation))
            if self._json_files:
                write_trajectory(self.path.parent / "trajectories", episode, step, annotation)
            self._write_token_bytes(connection, episode)
            return True

        return self._submit(write, done)

    def _export(self, exporter: OtlpExporter, episode: Episode, step: int, validation: bool, query: str) -> None:
        sent = False

        def export(connection: sqlite3.Connection) -> bool:
            nonlocal sent
            if not sent:  # else its batch had to wait for room on the disk
                sent = True
                self._mask(episode)
                exporter.export(episode, step, validation=validation, query=query)
            return True

        self._submit(export)

    def rewind(self, step: int, *, validated: bool = True) -> Future[bool]:
        """The run resumes after `step`: delete the episodes of later steps. `validated`: the validation after it was
        complete; else its episodes are deleted, too."""

        def delete(connection: sqlite3.Connection) -> bool:
            delete_after(connection, step, validated=validated)
            return True

        return self._submit(delete)

    def flush(self) -> bool:
        """Return when everything recorded so far is in the file. False if it can't be written now: then it waits for
        room, and the log says so."""
        done: Future[bool] = Future()
        self._jobs.put(_Write(lambda connection: True, done, keep=False))
        return done.exception() is None

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._jobs.put(None)
        self._thread.join()
        if self._exporter is not None:
            self._exporter.close()

    def _submit(self, work: Callable[[sqlite3.Connection], bool], done: Future[bool] | None = None) -> Future[bool]:
        job = _Write(work, done or Future())
        self._jobs.put(job)
        return job.done

    # ------------------------------------------------------------ on the writer's thread

    def _run(self, connection: sqlite3.Connection) -> None:
        ended = False
        lost = 0
        waiting: list[_Write] = []
        while not ended:
            batch = [self._jobs.get()]
            while len(batch) < _BATCH and not self._jobs.empty():
                batch.append(self._jobs.get())
            ended = None in batch
            jobs = [*waiting, *(job for job in batch if job is not None)]
            if (error := self._write(connection, jobs)) is None:
                waiting = []
                continue
            if not waiting:
                logger.warning("%s can't be written (%s): episodes wait for room in memory", self.path, error)
            kept = [job for job in jobs if job.keep]
            waiting = kept[:MOST_WAITING]
            lost += len(kept) - len(waiting)
        if missing := lost + len(waiting):
            logger.error("%s lacks %d episodes", self.path, missing, extra={LOST: True})
        connection.close()

    def _write(self, connection: sqlite3.Connection, jobs: list[_Write]) -> Exception | None:
        """Write all jobs, or none: then returns why not."""
        failed: Exception | None = None
        results: list[tuple[_Write, bool | Exception]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                results.append((job, self._try(connection, job)))
            commit(connection)
            self._prune(connection)
        except (sqlite3.Error, OSError) as error:  # nothing of this batch is acknowledged
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self._known_tokens = set()  # what of them is in the file, the next batch finds out
            failed, results = error, [(job, error) for job in jobs]
        for job, result in results:
            if isinstance(result, Exception) and failed is None:
                logger.error("episode not recorded: %s: %s", type(result).__name__, result)
            if job.done.done():
                continue  # it had to wait, and whoever asked for it knows
            if isinstance(result, Exception):
                job.done.set_exception(result)
            else:
                job.done.set_result(result)
        return failed

    def _try(self, connection: sqlite3.Connection, job: _Write) -> bool | Exception:
        """Run one job of a batch. If it fails, only this job is undone."""
        connection.execute("SAVEPOINT job")
        try:
            result: bool | Exception = job.work(connection)
        except sqlite3.OperationalError:  # disk full, I/O error: not this job's fault
            raise
        except Exception as error:  # reported through the future, and in the log
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # nor is this, of its JSON file
            connection.execute("ROLLBACK TO job")
            result = error
        connection.execute("RELEASE job")
        return result

    def _prune(self, connection: sqlite3.Connection) -> None:
        limit = self._kept.max_gb * _GIB
        if used_bytes(connection) <= limit:
            return
        removed = 0
        while used_bytes(connection) > limit * _PRUNE_TO:
            connection.execute("BEGIN IMMEDIATE")
            gone = delete_oldest(connection, _PRUNE_AT_ONCE)
            commit(connection)
            if not gone:
                break
            removed += gone
        logger.info("episodes.sqlite reached ajet.recorder.max_gb: the %d oldest episodes were deleted", removed)

    def _mask(self, episode: Episode) -> None:
        """Errors and what a workflow noted may hold a secret. Messages and tokens are kept as they were."""
        episode.metadata = self._masker.value(episode.metadata)
        episode.log_metrics = self._masker.value(episode.log_metrics)
        if episode.failure is not None:
            episode.failure.message = self._masker.text(episode.failure.message)
            episode.failure.traceback = self._masker.text(episode.failure.traceback)
        episode.spans = [replace(span, attributes=self._masker.value(span.attributes)) for span in episode.spans]
        if episode.environment is not None:
            for event in episode.environment.events:
                event.error = self._masker.text(event.error)

    def _write_token_bytes(self, connection: sqlite3.Connection, episode: Episode) -> None:
        ids = {index for run in episode.tree.runs for index in set(run.ids.tolist())}
        self._new_tokens |= ids - self._known_tokens
        if self._token_bytes is not None and self._new_tokens:
            found = self._token_bytes(sorted(self._new_tokens))
            connection.executemany("INSERT OR IGNORE INTO token (id, bytes) VALUES (?, ?)", found.items())
            self._known_tokens |= self._new_tokens
            self._new_tokens = set()


def _annotation(credit: EpisodeCreditLike | None, trainer_logprobs: Sequence[FloatArray] | None) -> Annotation | None:
    if credit is None and trainer_logprobs is None:
        return None
    calls = None
    if credit is not None:
        calls = [
            CallCreditRecord(float(call.advantage), float(call.weight), [(float(a), float(w)) for a, w in call.entries])
            for call in credit.calls
        ]
    return Annotation(calls, list(trainer_logprobs) if trainer_logprobs is not None else None)
