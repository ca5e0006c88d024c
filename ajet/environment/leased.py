"""`LeasedEnvironment`: one episode's hold on an environment, and what a workflow sees as `workflow_task.gym_env`.

Its methods block, and so belong in the episode's own thread or process; each has an awaitable twin (`astep`, …). An
environment's `async` methods run on a loop of their own, so both kinds can be used from either side. Everything asked
is recorded. `close` may be called from any thread, any number of times, and always ends the lease.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

from ajet.environment.environment import (
    Action,
    Environment,
    EnvironmentSource,
    Observation,
    StepResult,
    action_text,
    checked_first,
    checked_reward,
    checked_step,
    observation_text,
)
from ajet.schema.episode import EnvironmentEvent, EnvironmentRecord
from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError
from ajet.schema.task import Task

log = logging.getLogger(__name__)

OnEvent = Callable[[EnvironmentEvent], None]

KEPT_EVENTS = 1000
"""How many events of an episode are recorded; the rest are counted."""
KEPT_CHARS = 500
"""How much of an action or observation is recorded: enough to recognise it. The calls hold the whole text."""
END_S = 5.0
"""How long what an environment still awaits at its end may take to be cancelled."""


class LeasedEnvironment:
    """An environment in the hands of one episode. Opened by `open`."""

    def __init__(self, source: EnvironmentSource, task: Task, episode_uuid: str, on_event: OnEvent | None = None):
        self.episode_uuid = episode_uuid
        self.record = EnvironmentRecord(source.name, began=time.time())
        self.observation: Observation = None
        """The first observation."""
        self._source = source
        self._task = task
        self._on_event = on_event
        self._environment: Environment | None = None
        self._loop = _OwnLoop()
        self._busy = threading.RLock()
        """One request to the environment at a time."""
        self._closing = threading.Lock()
        self._closed = False
        self._opening = False
        self._rewards: list[float] = []
        self._done = False
        self._began = time.monotonic()

    def open(self) -> LeasedEnvironment:
        """Make the environment and begin the task."""
        with self._closing:
            self._opening = True
        try:
            with self._noted("reset") as event:
                self._environment = self._source.make(self.episode_uuid)
                self._reset(event)
        except BaseException:
            if self._opened():
                self._end()
            else:
                self.close()
            raise
        if self._opened():
            self._end()
            raise EnvironmentFault("the episode ended before its environment was ready")
        return self

    # ------------------------------------------------------------ for the workflow

    def reset(self) -> Observation:
        """The first observation. After steps, the task begins again."""
        with self._busy:
            if self._rewards or self._done:
                self._rewards, self._done = [], False
                with self._noted("reset") as event:
                    self._reset(event)
            return self.observation

    def _reset(self, event: EnvironmentEvent) -> None:
        self.observation = checked_first(self._call("reset", self._task), f"{self.record.name}.reset")
        event.observation = _beginning(observation_text(self.observation))

    def step(self, action: Action) -> StepResult:
        """Act. The result unpacks into observation, reward, terminate and info."""
        with self._busy:
            if self._done:
                raise EnvironmentFault(
                    "gym_env.step was called after the environment said that it is done: leave the loop when "
                    "`terminate` is true, or call gym_env.reset()"
                )
            with self._noted("step") as event:
                event.action = _beginning(action_text(action))
                result = checked_step(self._call("step", action), f"{self.record.name}.step")
                event.observation = _beginning(observation_text(result.observation))
                event.reward, event.done = result.reward, result.done
            self._rewards.append(result.reward)
            self._done = result.done
            return result

    def evaluate(self, episode_uuid: str | None = None, params: Mapping[str, Any] | None = None) -> float:
        """The episode's reward, as the environment sees it. `params` (such as `{"sparse": True}`) is for services;
        `episode_uuid` is always this episode's, and accepted for old files."""
        with self._busy, self._noted("evaluate") as event:
            if params and self._environment is not None and hasattr(self._environment, "evaluation_params"):
                self._environment.evaluation_params = dict(params)
            value = self._call("evaluate")
            if getattr(type(self._environment), "evaluate", None) is Environment.evaluate:  # none of its own
                value = sum(self._rewards)
            event.reward = checked_reward(value, self.record.name, EnvironmentUnavailableError)
            return event.reward

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that an environment offers, as far as it has said so itself."""
        return getattr(self._environment, "tools", None) or ()

    async def atools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that it offers. A service that hasn't said so is asked."""
        return await asyncio.to_thread(self._asked_tools)

    def _asked_tools(self) -> Sequence[Mapping[str, Any]]:
        ask = getattr(self._environment, "ask_for_tools", None)
        if self.tools or ask is None:
            return self.tools
        with self._busy:
            told: Sequence[Mapping[str, Any]] = ask()
            return told

    def info(self) -> Any:
        """What the environment's `get_info` tells, as of a service's tools; None if it has none."""
        ask = getattr(self._environment, "get_info", None)
        if ask is None:
            return None
        with self._busy:
            return self._loop.finish(ask())

    async def areset(self) -> Observation:
        return await asyncio.to_thread(self.reset)

    async def astep(self, action: Action) -> StepResult:
        return await asyncio.to_thread(self.step, action)

    async def aevaluate(self, params: Mapping[str, Any] | None = None) -> float:
        return await asyncio.to_thread(self.evaluate, None, params)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """End the lease. Never raises: what went wrong is logged and recorded."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            opening = self._opening
        if opening:  # `open` ends it as soon as it can; a service is told at once
            self._source.abandon(self.episode_uuid)
        else:
            self._end()

    def _opened(self) -> bool:
        """Opening is over. Whether the lease was closed meanwhile."""
        with self._closing:
            self._opening = False
            return self._closed

    def _end(self) -> None:
        if self._environment is not None:
            try:
                with self._noted("close"):
                    self._loop.finish(self._environment.close())
            except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 - user code: a failed close must
                # not discard a finished episode
                log.warning("closing %s failed with %s: %s", self.record.name, type(error).__name__, error)
        self._loop.close()

    # ------------------------------------------------------------ asking and recording

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._closed or self._environment is None:
            raise EnvironmentFault(f"episode {self.episode_uuid} is over: its environment takes no more requests")
        return self._loop.finish(getattr(self._environment, method)(*arguments))

    @contextmanager
    def _noted(self, what: str) -> Iterator[EnvironmentEvent]:
        """Records one event, with its duration and error."""
        event = EnvironmentEvent(what, time.monotonic() - self._began)
        try:
            yield event
        except BaseException as error:
            event.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            event.seconds = time.monotonic() - self._began - event.started_s
            self._note(event)

    def _note(self, event: EnvironmentEvent) -> None:
        if len(self.record.events) >= KEPT_EVENTS and event.what == "step" and not event.error:
            self.record.left_out += 1
            return
        self.record.events.append(event)
        if self._on_event is not None:
            self._on_event(event)


class _OwnLoop:
    """An event loop in a thread of its own, started when an environment first returns an awaitable."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finish(self, value: Any) -> Any:
        """The value, or what it awaits."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run, args=(self._loop,), name="ajet-environment", daemon=True).start()

        async def wait() -> tuple[Any, BaseException | None]:
            try:
                return await value, None
            except (KeyboardInterrupt, SystemExit) as error:  # raised here, it would end the loop before it answers
                return None, error

        try:
            answer, ending = asyncio.run_coroutine_threadsafe(wait(), self._loop).result()
        except CancelledError:
            raise EnvironmentFault("the environment was closed before it answered") from None
        if ending is not None:
            raise ending
        return answer

    def close(self) -> None:
        """End it, with all that still runs on it, so that nobody waits for an answer that can't come."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()

    @staticmethod
    async def _end() -> None:
        if unfinished := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished, timeout=END_S)
        asyncio.get_running_loop().stop()


def _beginning(text: str) -> str:
    return text if len(text) <= KEPT_CHARS else text[:KEPT_CHARS] + "…"
