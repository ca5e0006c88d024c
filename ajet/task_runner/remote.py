"""`RemoteRunner`: attempts run by `ajet runner` processes elsewhere. Lives on the service loop. `work`: the loop of a
worker of `ajet runner`.

This is `wrapper_type: remote`. The run serves a rollout store; each attempt is a rollout in it. A runner claims one,
asks here for access to the model, runs its own workflow code and reports a `WorkflowResult` as JSON. No code is sent,
and nothing that arrives is executed. The judge runs here. A runner that is not heard of for a lease is taken for dead:
a fault, after which the episode is run again.

A worker claims an attempt, runs the workflow, reports, and repeats. The workflow runs in a thread, so that heartbeats
continue whatever it does. If an attempt is cancelled (for example because its deadline has passed), the process exits,
and the runner starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from ajet.config import Config
from ajet.gateway.gateway import EpisodeKey
from ajet.schema.episode import Failure
from ajet.schema.errors import EngineError, RewardError
from ajet.schema.printable import is_secret_key, is_secret_variable
from ajet.schema.task import WorkflowTask
from ajet.store.client import StoreClient
from ajet.store.context import StoreCaller
from ajet.store.database_store import memory_store
from ajet.store.records import Attempt, AttemptedRollout, RolloutConfig, RolloutStatus
from ajet.store.requests import (
    AttemptRef,
    ConflictError,
    ProtocolMismatchError,
    QueryAttempts,
    Role,
    StoreError,
    StoreUnavailableError,
    UnknownIdError,
)
from ajet.store.rollout_store import RolloutStore
from ajet.store.server import StoreServer, accept
from ajet.store.states import ACTIVE
from ajet.system.http_messages import PREFIX
from ajet.system.http_server import tls_context
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.attempt import AttemptHandle, RunningAttempt, SessionProvider, WorkflowResult
from ajet.task_runner.endings import JudgeHere
from ajet.task_runner.results import describe, run_workflow
from ajet.task_runner.threads import EpisodeThreads
from ajet.task_runner.tuner import AjetTuner
from ajet.task_runner.workflow import Workflow

log = logging.getLogger(__name__)

KEY_VARIABLE = "AJET_RUNNER_KEY"
"""The key that runners send. Without it, a run makes one up and says it."""
OPEN = "open"
"""The extension of the store by which a runner gets access to the model."""
REMIND_S = 30.0
"""How often a run without runners says what it waits for."""
ANY_HOST = ("0.0.0.0", "::")


def runner_key() -> str:
    """The key that runners send: the environment's. If there is none, one is made up, and printed."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        key = f"{PREFIX}{secrets.token_hex(32)}"
        print(f"{KEY_VARIABLE}={key}", file=sys.stderr, flush=True)  # past the log, which masks keys
    return key


class RemoteRunner:
    """Serves a store to runners. `await start()` first."""

    def __init__(self, config: Config, sessions: SessionProvider, judge: BaseJudge | None) -> None:
        self.config = config
        self.sessions = sessions
        self.judge = JudgeHere(judge, config.ajet.rollout.episode_retries)
        self.store = memory_store()
        self._settings = config.ajet.task_runner.remote
        keys = "task_runner.remote.tls_cert and task_runner.remote.tls_key"
        tls = tls_context(self._settings.tls_cert, self._settings.tls_key, keys)
        self._server = StoreServer(self.store, tls=tls, extensions={OPEN: self._open})
        self._attempts: dict[str, _RemoteAttempt] = {}
        self.unclaimed = 0
        """Attempts that wait for a runner."""
        self.resources_id = ""
        self._reminded = 0.0
        self._closing: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Serve the store, and say how runners connect. Raises AddressError."""
        await self.store.open()
        key = runner_key()
        try:
            await self.store.tables(lambda tables: accept(tables, "runner", [Role.RUNNER], key))
        except StoreError as error:
            raise StoreError(f"{KEY_VARIABLE}: {error}") from None
        config = _without_keys(self.config.model_dump(mode="json"))
        self.resources_id = (await self.store.publish_resources({"config": config})).resources_id
        settings = self._settings
        await self._server.start(settings.host, settings.port, "task_runner.remote.host or task_runner.remote.port")
        log.warning("runners connect with: ajet runner --connect %s --workflow FILE.py->CLASS", self.url)

    @property
    def url(self) -> str:
        return self._server.url

    async def ready(self) -> None:
        """Wait for an idle runner, so that an episode's time begins when a runner can take it."""
        while self.store.waiting.in_line <= self.unclaimed:
            try:
                async with asyncio.timeout(REMIND_S):
                    await self.store.waiting.arrival()
            except TimeoutError:
                await self._remind()

    async def _remind(self) -> None:
        """Many episodes may wait, but one line says so."""
        now = asyncio.get_running_loop().time()
        if now - self._reminded < REMIND_S:
            return
        self._reminded = now
        if not (await self.store.query_workers(limit=1)).total:
            log.warning("no runner has connected yet: ajet runner --connect %s --workflow FILE.py->CLASS", self.url)

    def begin(self, attempt: AttemptHandle) -> RunningAttempt:
        running = _RemoteAttempt(self, attempt)
        self._attempts[running.ticket] = running
        self.unclaimed += 1
        return running

    def ended(self, attempt: _RemoteAttempt, cancel: str | None) -> None:
        """Forget an attempt. `cancel`: the rollout that nobody wants any more."""
        self._attempts.pop(attempt.ticket, None)
        if cancel is not None:
            task = asyncio.get_running_loop().create_task(self.store.cancel([cancel]))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        await asyncio.gather(self.judge.aclose(), *self._closing, return_exceptions=True)
        await self._server.aclose()
        await self.store.aclose()

    async def _open(self, caller: StoreCaller, asked: dict[str, Any]) -> dict[str, Any]:
        """A runner has claimed an attempt, and its workflow exists: give it the key of a session."""
        ticket, rollout_id, attempt_id = (asked.get(name) for name in ("ticket", "rollout_id", "attempt_id"))
        targets = asked.get("targets")
        texts = all(isinstance(value, str) for value in (ticket, rollout_id, attempt_id))
        if not texts or not (targets is None or _is_texts(targets)):
            raise StoreError("open takes ticket, rollout_id and attempt_id, and targets: a list of texts, or null")
        attempt = self._attempts.get(str(ticket))
        if attempt is None:
            raise UnknownIdError("this episode is over")
        latest = (await self.store.carry_out(QueryAttempts(rollout_id=str(rollout_id)), caller))[-1]
        if latest.attempt_id != attempt_id or latest.status not in ACTIVE or attempt.rollout_id != rollout_id:
            raise ConflictError("this attempt is not wanted any more")
        key = await attempt.access(targets)
        any_host = urlsplit(key.base_url).hostname in ("127.0.0.1", "::1") and (
            self.config.ajet.gateway.host in ANY_HOST
        )
        access = {"base_url": key.base_url, "api_key": key.api_key, "control_key": key.control_key}
        return {**access, "any_host": any_host}


class _RemoteAttempt(RunningAttempt):
    def __init__(self, runner: RemoteRunner, attempt: AttemptHandle) -> None:
        self.ticket = uuid.uuid4().hex
        self.rollout_id: str | None = None
        self._runner = runner
        self._attempt = attempt
        self._access: asyncio.Task[EpisodeKey] | None = None
        self._waits = True
        self._ended = False

    async def result(self) -> WorkflowResult:
        store = self._runner.store
        rollout = await store.enqueue_one(
            {"task": self._attempt.workflow_task.model_dump(mode="json", exclude={"gym_env"}), "ticket": self.ticket},
            resources_id=self._runner.resources_id,
            config=RolloutConfig(unresponsive_seconds=self._runner.config.ajet.task_runner.remote.lease),
        )
        self.rollout_id = rollout.rollout_id
        (ended,) = await store.wait([rollout.rollout_id])
        self._ended = True
        assert ended.attempt is not None
        result = self._result_of(ended.rollout.status, ended.attempt)
        await self._runner.judge.decide(result, self._attempt)
        return result

    def _result_of(self, status: RolloutStatus, attempt: Attempt) -> WorkflowResult:
        who = f"runner {attempt.worker_id}"
        if status is not RolloutStatus.SUCCEEDED:
            if attempt.status == "unresponsive":
                lease = self._runner.config.ajet.task_runner.remote.lease
                why = f"{who} was not heard of for {lease:g} s (task_runner.remote.lease)"
            else:
                why = f"{who}: {attempt.result}"
            return WorkflowResult(failure=Failure("RunnerLost", why), failed_in="isolation")
        try:
            return WorkflowResult.from_json(str(attempt.result))
        except (ValueError, TypeError, RewardError) as error:
            return WorkflowResult(
                failure=Failure("WorkflowFault", f"{who} reported no usable result: {error}"), failed_in="workflow"
            )

    async def access(self, targets: list[str] | None) -> EpisodeKey:
        """The session's key. Asked again, because the answer was lost or took too long, it is the same."""
        self._claimed()
        if self._access is None:
            self._access = asyncio.create_task(self._opened(targets))
        return await asyncio.shield(self._access)

    async def _opened(self, targets: list[str] | None) -> EpisodeKey:
        return await self._runner.sessions.access(await self._attempt.open_session(targets))

    def release(self) -> None:
        self._claimed()
        self._runner.ended(self, None if self._ended else self.rollout_id)

    def _claimed(self) -> None:
        if self._waits:
            self._waits = False
            self._runner.unclaimed -= 1
            self._runner.store.waiting.look_again()


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _without_keys(value: Any, leave_out: bool = False) -> Any:
    """A config as runners get it: they are given no key but their episode's.

    In the user's own blocks a key is None; in `ajet` it is left out, since `env`, for example, holds texts alone.
    """
    if isinstance(value, dict):
        return {
            name: None if _is_key(name) else _without_keys(inner, leave_out or name == "ajet")
            for name, inner in value.items()
            if not (leave_out and _is_key(name))
        }
    return [_without_keys(inner, leave_out) for inner in value] if isinstance(value, list) else value


def _is_key(name: str) -> bool:
    return is_secret_key(name) or (name.isupper() and is_secret_variable(name))


# ---------------------------------------------------------------- in a worker

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
        configs: dict[str | None, Config] = {}
        await _config(store, configs, None)  # what can't be run is refused before it is claimed
        threads = EpisodeThreads()
        while not ending():
            for claimed in await store.claim(settings.worker_id, wait_seconds=CLAIM_S):
                config = await _config(store, configs, claimed.rollout.resources_id)
                await _Run(store, settings, claimed, workflow_class, config, threads).finish()


async def _config(store: RolloutStore, known: dict[str | None, Config], resources_id: str | None) -> Config:
    """The trainer's configuration without secrets, as `tuner.config` shows it. None: the newest. Raises a StoreError
    if there is none, or if it is another version's."""
    if resources_id not in known:
        page = await store.query_resources(resources_id=resources_id, limit=1)
        given = page.items[0].resources.get("config") if page.items else None
        if given is None:
            raise StoreError(
                "--connect: that is a store, not a run: give the address that a run with task_runner.wrapper_type: "
                "remote logs\n    a store's rollouts are for programs of your own (ajet.store.client)"
            )
        try:
            known[resources_id] = Config.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise ProtocolMismatchError(
                f"this runner can't read the run's configuration: {'.'.join(map(str, first['loc']))}: {first['msg']}\n"
                "    install the same version of ajet on both sides"
            ) from None
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
        opening = asyncio.run_coroutine_threadsafe(self._store.extension(OPEN, asked), self._loop)
        try:
            access = await asyncio.wrap_future(opening)
        except StoreError as error:  # not the workflow's fault
            raise EngineError(f"the trainer gave no access to the model: {error}") from error
        if access.pop("any_host"):  # the gateway listens on every address: on the one that this runner knows, too
            access["base_url"] = _with_host(access["base_url"], self._settings.url)
        return AjetTuner.remote(**access, config=self._config, trainable_targets=targets)

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
