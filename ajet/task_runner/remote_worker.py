"""`work`: the loop of an `ajet runner` worker: claim an attempt, run the workflow, report, repeat.

The workflow runs in a thread, so that heartbeats continue whatever it does. If an attempt is cancelled (for example
because its deadline has passed), the process exits, and the runner starts another.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from ajet.config import Config
from ajet.schema.errors import EngineError
from ajet.schema.task import WorkflowTask
from ajet.store.client import StoreClient
from ajet.store.records import AttemptedRollout
from ajet.store.requests import AttemptRef, ConflictError, StoreError, StoreUnavailableError, UnknownIdError
from ajet.store.states import ACTIVE
from ajet.task_runner.attempt import WorkflowResult
from ajet.task_runner.results import describe, run_workflow
from ajet.task_runner.threads import EpisodeThreads
from ajet.task_runner.tuner import AjetTuner
from ajet.task_runner.workflow import Workflow

ABANDONED = 75
"""Exit code of a worker whose attempt was cancelled."""
CLAIM_S = 5.0
"""How long one claim waits. An idle worker notices within this time that it should end."""
BEATS_PER_LEASE = 4
LONGEST_BEAT_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The arguments of `ajet runner`."""

    url: str
    key: str
    worker_id: str
    ca: str | None
    patience_seconds: float
    parent: int
    """Process id of the runner. Its workers end when it is gone."""


async def work(settings: WorkerSettings, workflow_class: type[Workflow], stop: asyncio.Event) -> None:
    """Run attempts until `stop` is set or the runner is gone; the last one is finished. Raises a StoreError."""

    def ending() -> bool:
        return stop.is_set() or os.getppid() != settings.parent

    patience = settings.patience_seconds
    store = StoreClient(settings.url, settings.key, ca=settings.ca, patience_seconds=patience, in_a_hurry=ending)
    async with store:
        await store.info()
        configs: dict[str, Config] = {}
        threads = EpisodeThreads()
        while not ending():
            for claimed in await store.claim(settings.worker_id, wait_seconds=CLAIM_S):
                config = await _config(store, configs, claimed)
                await _Run(store, settings, claimed, workflow_class, config, threads).finish()


async def _config(store: StoreClient, known: dict[str, Config], claimed: AttemptedRollout) -> Config:
    """The trainer's configuration without secrets, as `tuner.config` shows it."""
    resources_id = claimed.rollout.resources_id or ""
    if resources_id not in known:
        page = await store.query_resources(resources_id=resources_id, limit=1)
        known[resources_id] = Config.model_validate(page.items[0].resources["config"])
    return known[resources_id]


class _Run:
    def __init__(
        self,
        store: StoreClient,
        settings: WorkerSettings,
        claimed: AttemptedRollout,
        workflow_class: type[Workflow],
        config: Config,
        threads: EpisodeThreads,
    ) -> None:
        assert claimed.attempt is not None
        self._store = store
        self._settings = settings
        self._rollout = claimed.rollout
        self._reference = AttemptRef(rollout_id=claimed.rollout.rollout_id, attempt_id=claimed.attempt.attempt_id)
        self._workflow_class = workflow_class
        self._config = config
        self._threads = threads
        self._loop = asyncio.get_running_loop()

    async def finish(self) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            result = await self._played()
            with suppress(UnknownIdError):  # it was deleted, so it needs no report
                await self._store.report(
                    self._reference.rollout_id, self._reference.attempt_id, "succeeded", result.to_json()
                )
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _played(self) -> WorkflowResult:
        try:
            task = WorkflowTask.model_validate(self._rollout.input["task"])
        except (KeyError, TypeError, ValueError) as error:
            return WorkflowResult(failure=describe(error), failed_in="isolation")
        thread = self._threads.start(lambda: run_workflow(self._workflow_class, None, task, self._tuner))
        try:
            return await asyncio.wrap_future(thread.result)
        finally:
            self._threads.release(thread)

    async def _tuner(self, targets: list[str] | None) -> AjetTuner:
        """Ask the trainer for access to the model. Runs in the thread's loop."""
        asked = {
            "ticket": self._rollout.input.get("ticket"),
            "rollout_id": self._reference.rollout_id,
            "attempt_id": self._reference.attempt_id,
            "targets": targets,
        }
        opening = asyncio.run_coroutine_threadsafe(self._store.extension("open", asked), self._loop)
        try:
            access = await asyncio.wrap_future(opening)
        except StoreError as error:  # not the workflow's fault
            raise EngineError(f"the trainer gave no access to the model: {error}") from error
        base_url = access["base_url"]
        if access["any_host"]:  # the gateway listens on every address: on the one that this runner knows, too
            base_url = _with_host(base_url, self._settings.url)
        keys = {"api_key": access["api_key"], "control_key": access["control_key"]}
        return AjetTuner.remote(base_url, config=self._config, trainable_targets=targets, **keys)

    async def _beat(self) -> None:
        lease = self._rollout.config.unresponsive_seconds
        pause = LONGEST_BEAT_S if lease is None else min(lease / BEATS_PER_LEASE, LONGEST_BEAT_S)
        while True:
            await asyncio.sleep(pause)
            try:
                (attempt,) = await self._store.heartbeat(self._settings.worker_id, [self._reference])
            except (StoreUnavailableError, UnknownIdError, ConflictError):
                os._exit(ABANDONED)
            if attempt.status not in ACTIVE:
                os._exit(ABANDONED)


def _with_host(url: str, known: str) -> str:
    parts, host = urlsplit(url), urlsplit(known).hostname or "127.0.0.1"
    return urlunsplit(parts._replace(netloc=f"[{host}]:{parts.port}" if ":" in host else f"{host}:{parts.port}"))
