"""`LitAgentRunner` and `Trainer`: execute the rollouts of a store with an agent; and the tracers they take."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, Generic, Literal, TypeVar

from ajet.backbone.trainer_api import QUERY_FIELDS
from ajet.backbone.trainer_api import Trainer as OurTrainer
from ajet.compat.agentlightning.agent import Agent, Hook, as_agent, bound, workflow_of
from ajet.compat.agentlightning.algorithms import Algorithm, Baseline
from ajet.compat.agentlightning.store import AttemptedRollout, InMemoryLightningStore, LightningStore, NamedResources
from ajet.observe.tracing import (
    NoRecordingError,
    Triplet,
    emit_exception,
    emit_reward,
    find_final_reward,
    record_spans,
    to_messages,
    to_triplets,
)
from ajet.schema.errors import UserError
from ajet.schema.resources import PromptTemplate
from ajet.schema.span import Span
from ajet.schema.task import finite_reward
from ajet.store.records import AttemptStatus, Mode
from ajet.store.requests import AttemptRef, StoreError, StoreUnavailableError
from ajet.task_runner.workflow import RolloutFunction

log = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_OCCURRENCE = "first_occurrence"
"""How rewards find their calls: in the order of time, each goes to the latest call before it that has none."""
SHORTEST_WAIT_S = 0.05
SPANS_S = 0.2
"""How often new spans are sent to the store."""
SHUTDOWN_S = 5.0
"""How long an agent that is stopped may take to clean up."""


class Tracer:
    """Records what is emitted within `trace_context`."""

    def __init__(self, **_: Any) -> None:
        """Options of the library's tracers choose what they instrument; there is nothing to instrument here."""
        self._spans: list[Span] = []

    @contextmanager
    def trace_context(
        self,
        name: str | None = None,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sink: Callable[[Span], None] | None = None,
    ) -> Iterator[list[Span]]:
        """What is emitted within belongs to this attempt; both ids or neither. Yields the spans so far; `sink` gets
        each as it ends."""
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("trace_context takes rollout_id and attempt_id together")
        with record_spans(sink, attempt_id=attempt_id or "local", rollout_id=rollout_id or "") as spans:
            self._spans = spans
            yield spans

    def get_last_trace(self) -> list[Span]:
        """The spans of the latest context."""
        return list(self._spans)


OtelTracer = Tracer
AgentOpsTracer = Tracer
DummyTracer = Tracer


class TraceAdapter(Generic[T]):
    """Override `adapt`. An adapter can be called like a function."""

    def adapt(self, spans: Sequence[Span]) -> T:
        raise UserError(f"{type(self).__name__} does not override `adapt`")

    def __call__(self, spans: Sequence[Span]) -> T:
        return self.adapt(spans)


class TracerTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Prompt, response and reward of each model call, of the agents whose name matches `agent_match`."""

    def __init__(self, *, agent_match: str | None = None, reward_match: str = FIRST_OCCURRENCE, **_: Any) -> None:
        """The library's other options say which spans tell of model calls; all that do are read."""
        if str(reward_match).lower().rpartition(".")[2] != FIRST_OCCURRENCE:
            raise UserError(f"reward_match={reward_match!r}: rewards are matched by {FIRST_OCCURRENCE!r} alone")
        self._agent = agent_match

    def adapt(self, spans: Sequence[Span]) -> list[Triplet]:
        return to_triplets(spans, agent=self._agent)


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """A conversation (`messages`, `tools`) per model call, to fine-tune on."""

    def adapt(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        return to_messages(spans)


LlmProxyTraceToTriplet = TracerTraceToTriplet
"""Model calls come from the gateway or from spans: both are read alike."""


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
        """One attempt, from its start to its report. Returns what the agent raised, or why it was stopped."""
        agent, store = self._at_work()
        assert rollout.attempt is not None
        reference = AttemptRef(rollout_id=rollout.rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
        await self._call_hooks("on_rollout_start", agent=agent, rollout=rollout)
        spans: list[Span] = []
        working = asyncio.create_task(self._work(agent, rollout, store, spans))
        watching = asyncio.create_task(self._watch(rollout, store, reference, spans))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            stopped = watching.done()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.wait({working, watching}, timeout=SHUTDOWN_S)
        if stopped:
            error: BaseException | None = UserError(f"the attempt was stopped: {watching.result()}")
        elif working.cancelled():
            error = UserError("the agent raised asyncio.CancelledError")
        else:
            error = working.result()
        await _store_spans(store, spans)
        if not stopped:
            reward = None if error is not None else find_final_reward(spans)
            result = {"reward": reward} if error is None else {"error": f"{type(error).__name__}: {error}"}
            status: Literal["succeeded", "failed"] = "succeeded" if error is None else "failed"
            await (await store.ready()).report(reference.rollout_id, reference.attempt_id, status, result)
        await self._call_hooks("on_rollout_end", agent=agent, rollout=rollout, spans=spans)
        return error

    async def _work(
        self, agent: Agent, rollout: AttemptedRollout, store: LightningStore, spans: list[Span]
    ) -> BaseException | None:
        """Call the agent. Its spans are in `spans` as soon as they end. Returns what it raised."""
        assert rollout.attempt is not None
        ids = {"rollout_id": rollout.rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        try:
            with self.tracer.trace_context(sink=spans.append, **ids):
                await self._call_hooks("on_trace_start", agent=agent, tracer=self.tracer, rollout=rollout)
                spans += _spans_of(await self._call(agent, rollout, store))
                await self._call_hooks("on_trace_end", agent=agent, tracer=self.tracer, rollout=rollout)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever an agent raises is its failure
            return raised
        return None

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

    async def _watch(
        self, rollout: AttemptedRollout, store: LightningStore, reference: AttemptRef, spans: Sequence[Span]
    ) -> str:
        """Send spans and heartbeats until the store says that the attempt is over. Returns its status."""
        timeout, sent, next_beat = rollout.rollout.config.timeout_seconds, 0, 0.0
        assert rollout.attempt is not None
        deadline = inf if timeout is None else time.monotonic() + timeout - (time.time() - rollout.attempt.start_time)
        while True:
            try:
                if new := list(spans[sent:]):
                    await _store_spans(store, new)
                    sent += len(new)
                if (now := time.monotonic()) >= min(next_beat, deadline):
                    (attempt,) = await (await store.ready()).heartbeat(self._worker, [reference])
                    if attempt.status not in (AttemptStatus.PREPARING, AttemptStatus.RUNNING):
                        return str(attempt.status)
                    next_beat = now + self._beat_s
            except StoreError as error:
                log.warning("rollout %s: the store doesn't take its heartbeat: %s", reference.rollout_id, error)
                next_beat = time.monotonic() + self._beat_s
            await asyncio.sleep(min(SPANS_S, self._beat_s))

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
    emit_reward(returned if isinstance(returned, bool) else finite_reward(returned, "the agent's reward"))
    return []


async def _store_spans(store: LightningStore, spans: Sequence[Span]) -> None:
    """Store spans. If one is refused, the others are stored without it. Those that are stored already stay as they
    are."""
    try:
        await store.add_many_spans(spans)
    except StoreUnavailableError:
        raise
    except StoreError:
        for span in spans:
            try:
                await store.add_many_spans([span])
            except StoreUnavailableError:
                raise
            except StoreError as error:
                log.error("the span %r (%s) is not stored: %s", span.name, span.span_id, error)


RUNNERS_WAIT_S = 0.2


class Trainer:
    """`Trainer(algorithm=VERL(config), n_runners=8).fit(agent, train, val_dataset=val)`."""

    def __init__(
        self,
        *,
        algorithm: Algorithm | None = None,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: Mapping[str, Any] | None = None,
        tracer: Tracer | None = None,
        store: LightningStore | None = None,
        hooks: Sequence[Any] | None = None,
        dev: bool = False,
        n_workers: int | None = None,
        exp_dir: str = "saved_experiments",
        fresh: bool = False,
        config: Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> None:
        """`config`: further keys of ours. `parts`: the library's other parts (`adapter`, `runner`, `strategy`, `port`,
        `llm_proxy`, `daemon`), which have nothing to do here."""
        unknown = parts.keys() - {"adapter", "runner", "strategy", "port", "llm_proxy", "daemon", "triplet_exporter"}
        if unknown:
            raise UserError(f"Trainer takes no {', '.join(sorted(unknown))}")
        self.algorithm = Baseline() if algorithm is None or dev else algorithm
        self.n_runners = n_runners or n_workers or 1
        self.initial_resources = dict(initial_resources or {})
        self.store = store or InMemoryLightningStore()
        self._max_rollouts, self._tracer, self._hooks = max_rollouts, tracer, hooks or ()
        self._exp_dir, self._fresh, self._config = exp_dir, fresh, dict(config or {})

    def fit(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None) -> Any:
        """Train: returns the run. Without an algorithm: the rollouts, each task having been executed once."""
        found = as_agent(agent)
        if isinstance(self.algorithm, Baseline):
            return _finish(self._each_once(found, train_dataset, val_dataset))
        templates = {name: value for name, value in self.initial_resources.items() if isinstance(value, PromptTemplate)}
        trainer = OurTrainer(
            {**self.algorithm.keys, **self._config},
            backbone=self.algorithm.backbone,
            n_runners=self.n_runners,
            prompt_template=templates or None,
            exp_dir=self._exp_dir,
            fresh=self._fresh,
        )
        return trainer.fit(workflow_of(found), train_dataset, val_dataset=val_dataset)

    def dev(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None) -> list[AttemptedRollout]:
        """Each task once; nothing is trained."""
        return _finish(self._each_once(as_agent(agent), train_dataset, val_dataset))

    async def _each_once(self, agent: Agent, train: Any, val: Any) -> list[AttemptedRollout]:
        tasks = [("train", task) for task in _items(train)] + [("val", task) for task in _items(val)]
        if not tasks:
            raise UserError("fit: there are no tasks: pass train_dataset=[…]")
        tasks = tasks[: self._max_rollouts]
        resources = self.initial_resources or _default_resources(agent, tasks[0][1])
        if resources:
            await self.store.add_resources(resources)
        queued = [(await self.store.enqueue_rollout(task, mode)).rollout_id for mode, task in tasks]  # type: ignore[arg-type]
        finished = asyncio.Event()
        runners = [asyncio.create_task(self._run(agent, number, finished)) for number in range(self.n_runners)]
        waiting = asyncio.create_task(self.store.wait_for_rollouts(rollout_ids=queued))
        try:
            await asyncio.wait([waiting, *runners], return_when=asyncio.FIRST_COMPLETED)
            finished.set()
            await asyncio.gather(*runners)
            return sorted(await waiting, key=lambda ended: queued.index(ended.rollout_id))
        finally:
            for task in (waiting, *runners):
                task.cancel()

    async def _run(self, agent: Agent, number: int, finished: asyncio.Event) -> None:
        runner = LitAgentRunner(self._tracer or Tracer(), poll_interval=RUNNERS_WAIT_S)
        with runner.run_context(agent=agent, store=self.store, hooks=self._hooks, worker_id=number):
            await runner.iter(event=finished)


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; in a notebook, whose own event loop is running, in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _items(dataset: Any) -> list[Any]:
    """A data set of the library has `__len__` and `__getitem__`."""
    if dataset is None:
        return []
    return [dataset[index] for index in range(len(dataset))] if hasattr(dataset, "__getitem__") else list(dataset)


def _default_resources(agent: Agent, task: Any) -> dict[str, Any]:
    """An agent that takes a prompt template, and was given none, gets one that holds the task's text."""
    if not isinstance(agent, RolloutFunction) or "prompt_template" not in agent.parameters:
        return {}
    names = [name for name in QUERY_FIELDS if isinstance(task, Mapping) and isinstance(task.get(name), str)]
    if not names:
        raise UserError(
            "fit: the agent takes prompt_template, and there is none\n"
            "    give one: Trainer(initial_resources={'main': PromptTemplate('… {question} …')})"
        )
    log.info("no prompt template was given: the agent gets {%s}", names[0])
    return {"prompt_template": PromptTemplate(f"{{{names[0]}}}")}
