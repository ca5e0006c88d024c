"""`LitAgentRunner`: executes the rollouts of a store with an agent, in this process."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from ajet.compat.agentlightning.agent import Agent, Hook, as_agent, bound
from ajet.compat.agentlightning.store import AttemptedRollout, LightningStore, NamedResources
from ajet.compat.agentlightning.tracers import Tracer
from ajet.observe.tracing import NoRecordingError, emit_exception, emit_reward
from ajet.schema.span import Span
from ajet.schema.task import finite_reward
from ajet.store.records import Mode
from ajet.store.requests import AttemptRef

log = logging.getLogger(__name__)
SHORTEST_WAIT_S = 0.05


class LitAgentRunner:
    """`with runner.run_context(agent=…, store=…): await runner.step(task)`, or `await runner.iter()`."""

    def __init__(
        self,
        tracer: Tracer | None = None,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        **_: Any,
    ) -> None:
        """`poll_interval`: the longest wait of one claim, after which `event` is looked at."""
        self.tracer = tracer or Tracer()
        self._max_rollouts = max_rollouts
        self._wait_s, self._beat_s = max(poll_interval, SHORTEST_WAIT_S), heartbeat_interval
        self._agent: Agent | None = None
        self._store: LightningStore | None = None
        self._hooks: Sequence[Hook] = ()
        self._worker = "Worker-0"

    @contextmanager
    def run_context(
        self, *, agent: Any, store: LightningStore, hooks: Sequence[Hook] | None = None, worker_id: int | None = None
    ) -> Iterator[LitAgentRunner]:
        """Within this, the runner works for this store."""
        self._agent, self._store, self._hooks = as_agent(agent), store, hooks or ()
        self._worker = f"Worker-{worker_id or 0}"
        try:
            yield self
        finally:
            self._agent = self._store = None

    async def step(
        self, input: Any, *, resources: NamedResources | None = None, mode: Mode | None = None, event: Any = None
    ) -> AttemptedRollout:
        """Execute one task at once. Raises what the agent raises."""
        store = self._at_work()[1]
        resources_id = None if resources is None else (await store.add_resources(resources)).resources_id
        started = await store.start_rollout(input, mode, resources_id, worker_id=self._worker)
        error = await self._execute(started)
        if error is not None:
            raise error
        ended = await store.get_rollout_by_id(started.rollout.rollout_id)
        assert ended is not None
        return ended

    async def iter(self, *, event: Any = None) -> None:
        """Execute what is queued until `event` is set, or `max_rollouts` are done. An agent's errors are logged."""
        store, done = self._at_work()[1], 0
        while (event is None or not event.is_set()) and (self._max_rollouts is None or done < self._max_rollouts):
            for claimed in await store.dequeue_many_rollouts(worker_id=self._worker, wait_seconds=self._wait_s):
                error = await self._execute(claimed)
                if error is not None:
                    log.error("rollout %s failed", claimed.rollout.rollout_id, exc_info=error)
                done += 1

    def _at_work(self) -> tuple[Agent, LightningStore]:
        if self._agent is None or self._store is None:
            raise RuntimeError("a runner works within `with runner.run_context(agent=…, store=…):`")
        return self._agent, self._store

    async def _execute(self, rollout: AttemptedRollout) -> BaseException | None:
        """One attempt, from its start to its report. Returns what the agent raised."""
        agent, store = self._at_work()
        assert rollout.attempt is not None
        reference = AttemptRef(rollout_id=rollout.rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
        beating = asyncio.create_task(self._beat(store, reference))
        await self._call_hooks("on_rollout_start", agent=agent, rollout=rollout)
        error: BaseException | None = None
        spans: list[Span] = []
        try:
            with self.tracer.trace_context(rollout_id=reference.rollout_id, attempt_id=reference.attempt_id) as spans:
                await self._call_hooks("on_trace_start", agent=agent, tracer=self.tracer, rollout=rollout)
                spans += _spans_of(await self._call(agent, rollout, store))
                await self._call_hooks("on_trace_end", agent=agent, tracer=self.tracer, rollout=rollout)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever an agent raises is its failure
            error = raised
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating
        await store.add_many_spans(spans)
        status: Literal["succeeded", "failed"] = "succeeded" if error is None else "failed"
        await store.update_attempt(reference.rollout_id, reference.attempt_id, status)
        await self._call_hooks("on_rollout_end", agent=agent, rollout=rollout, spans=spans)
        return error

    async def _call(self, agent: Agent, rollout: AttemptedRollout, store: LightningStore) -> Any:
        resources_id = rollout.rollout.resources_id
        found = await (store.get_resources_by_id(resources_id) if resources_id else store.get_latest_resources())
        function, arguments = bound(agent, rollout, {} if found is None else found.resources)
        try:
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
                getattr(function, "__wrapped__", 0)
            ):
                return await function(**arguments)
            returned = await asyncio.to_thread(function, **arguments)
            return await returned if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:
            with suppress(NoRecordingError):
                emit_exception(error)
            raise

    async def _beat(self, store: LightningStore, reference: AttemptRef) -> None:
        while True:
            await (await store.ready()).heartbeat(self._worker, [reference])
            await asyncio.sleep(self._beat_s)

    async def _call_hooks(self, name: str, **given: Any) -> None:
        for hook in self._hooks:
            try:
                await getattr(hook, name)(runner=self, **given)
            except Exception:  # a hook is the user's: what it watches goes on
                log.exception("%s of %s failed", name, type(hook).__name__)


def _spans_of(returned: Any) -> list[Span]:
    """What an agent returned, as spans: a reward is emitted, and None means that all was emitted."""
    if returned is None:
        return []
    if isinstance(returned, list) and all(isinstance(one, Span) for one in returned):
        return returned
    emit_reward(finite_reward(returned, "the agent's reward"))
    return []
