"""`Runtime`: builds and owns everything that episodes need in one process, on a service loop in a thread of its own.

Engine and tokenizer load in the background while the user's workflow is imported. Used by every backbone: one object in
each process that runs episodes. `start` and `stop` are called from outside of the service loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings
from ajet.engine.base import Engine, build_engine
from ajet.engine.model_source import ModelSource
from ajet.gateway.gateway import EpisodeKey, Gateway, GatewaySettings
from ajet.helper import HelperModel
from ajet.schema.errors import ConfigError, UserError
from ajet.session import EpisodeSession, SessionSettings
from ajet.session.reply_parser import ReplyParser
from ajet.session.tool_call_parsers import pick_parser
from ajet.task_judge.base_judge import load_judge
from ajet.task_rollout.pool import OnEpisode, RolloutPool
from ajet.task_runner.attempt import Attempt, AttemptRunner
from ajet.task_runner.breakpoints import debugging
from ajet.task_runner.fork_server import WORKFLOW_KEY
from ajet.task_runner.processes import ProcessRunner
from ajet.task_runner.runner import TaskRunner
from ajet.task_runner.threads import EpisodeThreads, ThreadRunner
from ajet.tuner import AjetTuner
from ajet.user_code import import_class
from ajet.workflow import Workflow

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.schema.task import WorkflowTask

log = logging.getLogger(__name__)
T = TypeVar("T")

_WAKE_S = 0.2


def outcome(running: Future[T]) -> T:
    """Wait for a result in short sleeps: CPython does not see a signal that comes just as it falls asleep, and Ctrl-C
    would then be lost until the sleep ends."""
    while not wait([running], timeout=_WAKE_S).done:
        pass
    return running.result()


STOP_S = 3.0
"""How long each stage of stopping may take: Ctrl-C ends a run within 10 s."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a session needs of the model: known as soon as the tokenizer is loaded, long before the weights are."""

    tokenizer: Any
    renderer: Renderer
    parser: ReplyParser
    engine: Engine


class Runtime:
    """Everything that episodes need in one process."""

    def __init__(
        self,
        config: Config,
        *,
        make_engine: Callable[[Config], Engine] = build_engine,
        parallel: int | None = None,
        on_episode: OnEpisode | None = None,
        on_start: Callable[[WorkflowTask], None] | None = None,
    ) -> None:
        """`make_engine`: where tokens come from, if a backbone brings its own. `parallel`: instead of the config's."""
        self.config = config
        self.loop = asyncio.new_event_loop()
        self.gateway = Gateway(GatewaySettings.from_config(config))
        self.runner: TaskRunner
        self.pool: RolloutPool
        self.attempts: AttemptRunner
        self._make_engine = make_engine
        self._parallel = parallel
        self._on_episode = on_episode
        self._on_start = on_start
        self._tracker_settings = TrackerSettings.from_config(config)
        self._model: Future[Model] = Future()
        self._imported = threading.Event()
        self._engine_trouble: UserError | None = None
        self._threads = [
            threading.Thread(target=self._serve, name="ajet-service", daemon=True),
            threading.Thread(target=self._load, name="ajet-load", daemon=True),
        ]
        self._stopped = False

    # ------------------------------------------------------------ life

    def start(self) -> Runtime:
        """Start everything; returns when the user's code is imported. Raises a `UserError` if that is wrong."""
        try:
            self._start()
        except BaseException:  # Ctrl-C too: whatever was started ends
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all episodes and everything else that was started. Takes at most a few `STOP_S`."""
        if self._stopped:
            return
        self._stopped = True
        if not self.loop.is_running():
            return
        for stage in (self._stop_episodes, self._stop_engine, self._stop_servers):
            stopping = self.submit(stage())
            if wait([stopping], STOP_S).not_done:
                log.warning("%s did not end within %.0f s", stage.__name__.removeprefix("_stop_"), STOP_S)
                stopping.cancel()
            elif (error := stopping.exception()) is not None:
                log.warning("%s ended with %s: %s", stage.__name__.removeprefix("_stop_"), type(error).__name__, error)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._threads[0].join(STOP_S)

    def __enter__(self) -> Runtime:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ------------------------------------------------------------ crossing

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the service loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the service loop and wait for it. Ctrl-C interrupts the wait, and cancels the work."""
        running = self.submit(work)
        try:
            return outcome(running)
        except BaseException:
            running.cancel()
            raise

    def model(self) -> Model:
        """Wait until the tokenizer is loaded. From outside of the service loop."""
        return outcome(self._model)

    def engine_ready(self) -> Engine:
        """Wait until the engine can draw a reply, and return it. Raises what went wrong while loading."""
        engine = self.model().engine
        self.run(engine.ready())
        return engine

    # ------------------------------------------------------------ supplies (on the service loop)

    async def open_session(self, attempt: Attempt) -> EpisodeSession:
        """A session for one attempt at an episode."""
        model = await asyncio.shield(asyncio.wrap_future(self._model))
        if self._engine_trouble is not None:
            raise self._engine_trouble
        task = attempt.workflow_task
        tracker = ContextTracker(model.renderer, self._tracker_settings)
        settings = SessionSettings.from_config(
            self.config,
            validation=attempt.validation,
            trainable_targets=attempt.trainable_targets,
            step=attempt.step,
            task=task.task_id,
            repeat=task.task_thread_index,
        )
        return EpisodeSession(
            episode_id=attempt.episode_id,
            tracker=tracker,
            renderer=model.renderer,
            engine=model.engine,
            parser=model.parser,
            settings=settings,
            deadline_s=attempt.deadline_s,
        )

    def tuner(self, session: EpisodeSession) -> AjetTuner:
        """What a workflow in this process gets."""
        return AjetTuner(session, self.config, self.loop, self.gateway)

    async def access(self, session: EpisodeSession) -> EpisodeKey:
        """What a workflow in another process needs."""
        return self.gateway.register(session)

    # ------------------------------------------------------------ building

    def _start(self) -> None:
        if self.config.ajet.helper.model is not None:
            HelperModel.from_config(self.config).endpoint()  # without one the run ends here
        isolated = self.config.ajet.task_runner.wrapper_type == "multi-processing"
        if isolated and debugging():
            log.warning("debugging: the workflow runs in a thread of this process, where breakpoints can stop it")
            isolated = False
        if isolated:
            # first of all: the server imports the user's code on another core while this process loads the model
            self.attempts = ProcessRunner(self.config, self, self.config.base_dirs)
        for thread in self._threads:
            thread.start()
        self.run(self.gateway.start())
        try:
            if not isolated:
                self.attempts = self._thread_runner()
        finally:
            self._imported.set()
        self.runner = TaskRunner(self, self.attempts)
        self.pool = self.run(self._make_pool(isolated))

    def _thread_runner(self) -> ThreadRunner:
        """Imports the user's workflow and judge."""
        ajet = self.config.ajet
        base_dirs = self.config.base_dirs
        workflow_class = import_class(ajet.rollout.user_workflow or "", Workflow, key=WORKFLOW_KEY, base_dirs=base_dirs)
        threads = EpisodeThreads(
            ajet.task_runner.max_lost_threads, collect_garbage=ajet.task_runner.wrapper_type == "asyncio-with-gc"
        )
        return ThreadRunner(workflow_class, load_judge(self.config, base_dirs), self, threads)

    async def _make_pool(self, isolated: bool) -> RolloutPool:
        parallel = self._parallel or self.config.ajet.rollout.max_env_worker
        processes = self.config.ajet.task_runner.processes
        if isolated and isinstance(processes, int):
            parallel = min(parallel, processes)
        return RolloutPool(
            self.runner, self.config, on_episode=self._on_episode, on_start=self._on_start, parallel=parallel
        )

    def _load(self) -> None:
        """In a thread: the tokenizer first, as episodes can begin with it, then the engine, which loads by itself.

        The engine's libraries wait for the user's: imports share one interpreter lock, and the workflow's first line is
        what someone who debugs waits for.
        """
        name = self.config.ajet.model.path
        try:
            tokenizer = ModelSource.resolve(name).tokenizer()
            renderer = Renderer(tokenizer, reasoning_history=self.config.ajet.rollout.reasoning_history)
            parser = pick_parser(getattr(tokenizer, "chat_template", None))
            self._imported.wait()
            engine = self._make_engine(self.config)
        except UserError as error:
            self._model.set_exception(error)
        except Exception as error:  # noqa: BLE001 - whatever a library raises over a model, the run can't go on
            named = ConfigError(f"ajet.model.path: {name!r} can't be loaded: {type(error).__name__}: {error}")
            named.__cause__ = error
            self._model.set_exception(named)
        else:
            self._model.set_result(Model(tokenizer, renderer, parser, engine))
            self.submit(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        """An engine that can't load ends the run with its own words, instead of failing each episode."""
        try:
            await engine.ready()
        except UserError as error:
            self._engine_trouble = error
        except Exception as error:  # noqa: BLE001 - as above
            name = self.config.ajet.rollout.engine
            self._engine_trouble = ConfigError(
                f"ajet.rollout.engine: {name} could not load {self.config.ajet.model.path!r}: "
                f"{type(error).__name__}: {error}"
            )

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    # ------------------------------------------------------------ stopping

    async def _stop_episodes(self) -> None:
        if hasattr(self, "pool"):
            self.pool.stop_all()
            while self.pool.running:
                await asyncio.sleep(0.01)

    async def _stop_engine(self) -> None:
        if self._model.done() and self._model.exception() is None:
            await self._model.result().engine.aclose()

    async def _stop_servers(self) -> None:
        if hasattr(self, "attempts"):
            await self.attempts.aclose()
        await self.gateway.aclose()
