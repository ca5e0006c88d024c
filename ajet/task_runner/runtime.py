"""`Runtime`: everything that episodes need in one process: model, gateway, runner and pool, on a service loop.

Every backbone has one in each process that runs episodes. `start`, `stop` and `run` are called from outside the service
loop; runners call the `SessionProvider` methods on it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ajet.context_tracker import TrackerSettings
from ajet.engine.base import Engine
from ajet.gateway.chat import EpisodeSession, SeedKey, SessionSettings
from ajet.gateway.gateway import EpisodeKey, Gateway, GatewaySettings
from ajet.schema.errors import EngineError, UserError
from ajet.task_judge.base_judge import BaseJudge, GroupJudge, load_judge
from ajet.task_judge.helper import HelperModel
from ajet.task_runner.attempt import AttemptRunner, WorkflowAttempt
from ajet.task_runner.breakpoints import debugging
from ajet.task_runner.endings import LateJudge
from ajet.task_runner.environments import find_environment, find_sandbox, load_workflow
from ajet.task_runner.external_episodes import ExternalEpisodes, ExternalRunner
from ajet.task_runner.model import MakeEngine, Model, ModelLoader, build_engine
from ajet.task_runner.pool import OnEpisode, RolloutPool
from ajet.task_runner.runner import TaskRunner
from ajet.task_runner.thread_control import short_turns
from ajet.task_runner.threads import EpisodeThreads, ThreadRunner
from ajet.task_runner.tuner import AjetTuner

log = logging.getLogger(__name__)
T = TypeVar("T")

_WAKE_S = 0.2


def wait_for(running: Future[T]) -> T:
    """Wait for a result in short sleeps: CPython misses a signal that arrives just as it goes to sleep, so one long
    sleep could delay Ctrl-C to its end."""
    while not wait([running], timeout=_WAKE_S).done:
        pass
    return running.result()


class ServiceLoop:
    """The event loop, in a thread, on which gateway, sessions, trackers and pool live.

    All methods are called from other threads.
    """

    def __init__(self) -> None:
        self.asyncio_loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ajet-service", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.asyncio_loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it. Ctrl-C interrupts the wait and cancels the work."""
        running = self.submit(work)
        try:
            return wait_for(running)
        except BaseException:
            running.cancel()
            raise

    def stop(self, patience_s: float) -> None:
        """Cancel all tasks, end the loop and wait for its thread."""
        self.asyncio_loop.call_soon_threadsafe(self.asyncio_loop.stop)
        self._thread.join(patience_s)

    def _run(self) -> None:
        loop = self.asyncio_loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.schema.task import WorkflowTask

GARBAGE = (50_000, 20, 10)
"""Python's own thresholds have it look for cyclic garbage after every 700 new objects: a seventh of what episodes cost
beside the model. Hardly any of them are garbage then."""

STOP_S = 3.0
"""How long each stage of stopping may take, and what those before it left over: Ctrl-C ends a run within 10 s."""


class Runtime:
    def __init__(
        self,
        config: Config,
        *,
        make_engine: MakeEngine = build_engine,
        parallel: int | None = None,
        on_episode: OnEpisode = lambda episode: None,
        on_start: Callable[[WorkflowTask], None] = lambda workflow_task: None,
    ) -> None:
        """`make_engine`: for backbones with an engine of their own. `parallel` overrides the config."""
        self.config = config
        self.gateway = Gateway(GatewaySettings.from_config(config))
        self.pool: RolloutPool
        self.attempts: AttemptRunner
        self._service = ServiceLoop()
        self.loop = self._service.asyncio_loop
        self._loader = ModelLoader(config, make_engine)
        self._limits = TrackerSettings.from_config(config)
        self._parallel = parallel
        self._on_episode = on_episode
        self._on_start = on_start
        self.external: ExternalEpisodes | None = None
        """With `wrapper_type: outside`: the episodes that external programs begin."""
        self._judge: BaseJudge | None = None
        self._stopped = False
        self._garbage_before = gc.get_threshold()

    # ------------------------------------------------------------ life

    def start(self) -> Runtime:
        """Start everything; returns once the user's code is imported. Raises a `UserError` if that fails."""
        gc.set_threshold(*GARBAGE)
        try:
            self._start()
        except BaseException:  # including Ctrl-C: end whatever was started
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all episodes and everything else that was started. Takes at most a few `STOP_S`."""
        if self._stopped:
            return
        self._stopped = True
        self._loader.stop()
        gc.set_threshold(*self._garbage_before)
        if not self._service.running:
            return
        until = time.monotonic()
        with short_turns():
            for stage in (self._stop_episodes, self._stop_engine, self._stop_servers):
                until += STOP_S
                self._stop_stage(stage, until)
            self._service.stop(STOP_S)

    def _stop_stage(self, stage: Callable[[], Coroutine[Any, Any, None]], until: float) -> None:
        name = stage.__name__.removeprefix("_stop_")
        stopping = self.submit(stage())
        if wait([stopping], until - time.monotonic()).not_done:
            log.warning("%s did not end in time", name)
            stopping.cancel()
        elif (error := stopping.exception()) is not None:
            log.warning("%s ended with %s: %s", name, type(error).__name__, error)

    def __enter__(self) -> Runtime:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ------------------------------------------------------------ from other threads

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the service loop."""
        return self._service.submit(work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the service loop and wait for it. Ctrl-C interrupts the wait and cancels the work."""
        return self._service.run(work)

    def model(self) -> Model:
        """Wait until the tokenizer is loaded."""
        return wait_for(self._loader.loaded)

    def engine_ready(self) -> Engine:
        """Wait for the engine and return it. Raises what stopped it from loading, as a `UserError`."""
        engine = self.model().engine
        try:
            self.run(engine.ready())
        except EngineError as error:
            raise self._loader.refusal(error) from error
        return engine

    # ------------------------------------------------------------ sessions, on the service loop

    async def open_session(self, attempt: WorkflowAttempt) -> EpisodeSession:
        model = await asyncio.shield(asyncio.wrap_future(self._loader.loaded))
        self.check_engine()
        task = attempt.workflow_task
        seed = self.config.ajet.rollout.seed
        seed_key = SeedKey(seed, attempt.step, task.task_id, task.task_thread_index, attempt.occurrence)
        settings = SessionSettings.from_config(
            self.config, seed_key, attempt.trainable_targets, validation=task.validation
        )
        return model.open_session(task.episode_uuid, settings, self._limits, attempt.deadline_s)

    def check_engine(self) -> None:
        """Raise why the engine will never be ready, if it won't."""
        if self._loader.engine_error is not None:
            raise self._loader.engine_error

    def tuner(self, session: EpisodeSession) -> AjetTuner:
        """The tuner of a workflow in this process."""
        return AjetTuner(session, self.config, self.loop, self.gateway)

    async def access(self, session: EpisodeSession) -> EpisodeKey:
        """How a workflow in another process reaches the session."""
        key = self.gateway.register(session)
        if self.config.ajet.task_runner.wrapper_type == "multi-processing":
            key = replace(key, base_url=await self.gateway.local_url())
        return key

    # ------------------------------------------------------------ starting

    def _start(self) -> None:
        self._service.start()
        if self.config.ajet.helper.model is not None:
            HelperModel.from_config(self.config).endpoint()  # a missing one ends the run here
        wrapper = self.config.ajet.task_runner.wrapper_type
        isolated = wrapper == "multi-processing"
        if isolated and debugging():
            log.warning("debugging: the workflow runs in a thread of this process, where breakpoints can stop it")
            isolated = False
        if isolated:
            from ajet.task_runner.processes import ProcessRunner

            # first, so that the server imports the user's code on another core while this process loads the model
            self.attempts = ProcessRunner(self.config, self)
            if self.config.ajet.task_judge.judge_type != "customized_protocol":
                self._judge = load_judge(self.config)  # ours: what is wrong with it ends the run
        self._loader.start()
        self._loader.loaded.add_done_callback(self._watch_engine)
        if wrapper != "outside":
            self.run(self.gateway.start())
        if not isolated:
            self._judge = load_judge(self.config)
        if wrapper == "remote":
            from ajet.task_runner.remote import RemoteRunner  # and the whole store, which other runs don't need

            runner = self.attempts = RemoteRunner(self.config, self, self._judge)
            self.run(runner.start())
        elif wrapper == "outside":
            self.attempts = ExternalRunner(self, self._judge)
        elif not isolated:
            self.attempts = self._thread_runner()
        self._loader.user_code_imported()
        self._prepared(self._judge)
        self.pool = self._make_pool()
        if isinstance(self.attempts, ExternalRunner):  # from now on, external programs may begin episodes
            self.external = ExternalEpisodes(self.config, self.attempts, self.pool, on_start=self._on_start)
            self.gateway.external = self.external
            # not earlier: a program that is waiting for us would be told that there is no such path
            self.run(self.gateway.start())
            self.external.say_how(self.gateway.base_url)

    def _thread_runner(self) -> ThreadRunner:
        workflow_class = load_workflow(self.config)
        threads = EpisodeThreads(collect_garbage=self.config.ajet.task_runner.wrapper_type == "asyncio-with-gc")
        environments = find_environment(self.config)
        sandboxes = find_sandbox(self.config)
        return ThreadRunner(workflow_class, self._judge, self, threads, environments, sandboxes)

    def _late_judge(self) -> LateJudge:
        """Load a judge that decides later. With isolated workflows, one of the user's is imported when it is needed."""
        return LateJudge(
            lambda: self._judge or self._prepared(load_judge(self.config)),
            self.config.ajet.rollout,
        )

    def _prepared(self, judge: BaseJudge | None) -> BaseJudge | None:
        if isinstance(judge, GroupJudge):
            judge.prepare()
        return judge

    def _make_pool(self) -> RolloutPool:
        return RolloutPool(
            TaskRunner(self, self.attempts, self._late_judge()),
            self.config,
            on_episode=self._on_episode,
            on_start=self._on_start,
            parallel=self._parallel,
        )

    def _watch_engine(self, loaded: Future[Model]) -> None:
        if loaded.exception() is None and not self._stopped:
            self.submit(self._loader.watch_engine())

    # ------------------------------------------------------------ stopping

    async def _stop_episodes(self) -> None:
        if self.external is not None:
            await self.external.aclose()
        if hasattr(self, "pool"):
            self.pool.stop_all()
            while self.pool.running:
                await asyncio.sleep(0.01)
        if hasattr(self, "attempts"):  # before the engine: threads that compute would slow its end down
            await self.attempts.aclose()

    async def _stop_engine(self) -> None:
        if not self._loader.makes_engine:
            return
        try:
            model = await asyncio.shield(asyncio.wrap_future(self._loader.loaded))
        except UserError:
            return
        await model.engine.aclose()

    async def _stop_servers(self) -> None:
        await self.gateway.aclose()
