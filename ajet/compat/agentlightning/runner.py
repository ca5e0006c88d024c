"""Agents (functions with `@rollout`, and classes derived from `LitAgent`), and `LitAgentRunner`, which executes the
rollouts of a store with one."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ajet.compat.agentlightning.store import AttemptedRollout, LightningStore, NamedResources
from ajet.compat.agentlightning.tracer import AgentOpsTracer, Tracer
from ajet.observe.tracing import NoRecordingError, emit_exception, emit_reward, find_final_reward
from ajet.schema.errors import UserError
from ajet.schema.resources import LLM, PromptTemplate
from ajet.schema.span import Span
from ajet.schema.task import WorkflowOutput, WorkflowTask, finite_reward
from ajet.store.records import Attempt, AttemptStatus, Mode, Rollout, RolloutStatus
from ajet.store.requests import AttemptRef, StoreError, StoreUnavailableError
from ajet.task_runner.results import called
from ajet.task_runner.thread_control import call_off_loop
from ajet.task_runner.threads import EpisodeThreads
from ajet.task_runner.workflow import RolloutFunction, RolloutFunctionError, Workflow, output_of, record_of
from ajet.task_runner.workflow import rollout as rollout

if TYPE_CHECKING:
    from ajet.task_runner.tuner import AjetTuner

log = logging.getLogger(__name__)
T = TypeVar("T")
SHORTEST_WAIT_S = 0.05
SPANS_S = 0.2
"""How often new spans are sent to the store."""
SHUTDOWN_S = 5.0
"""How long an agent that is stopped may take to clean up."""


class MissingResourceError(UserError, ValueError):
    """An agent takes a resource that it was not given."""


class AgentSignatureError(RolloutFunctionError, ValueError):
    """`@llm_rollout` or `@prompt_rollout` on a function that doesn't take what it is named after."""


class Hook:
    """Callbacks around an agent's execution. All arguments are keywords; exceptions are logged."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None: ...

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None: ...

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None: ...

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None: ...


class LitAgent(Generic[T]):
    """Override `rollout`, or `training_rollout` and `validation_rollout`, or their twins that end in `_async`."""

    def rollout(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        raise UserError(f"{type(self).__name__} overrides neither `rollout` nor any of its variants")

    def training_rollout(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        return self.rollout(task, resources, rollout)

    async def rollout_async(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: Any) -> Any:
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Whether any of the coroutines is overridden: then all modes use them."""
        names = ("rollout_async", "training_rollout_async", "validation_rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in names)

    def method(self, mode: str | None) -> Callable[..., Any]:
        """What is called in this mode. All but `train` validate."""
        name = "training_rollout" if mode == "train" else "validation_rollout"
        found: Callable[..., Any] = getattr(self, f"{name}_async" if self.is_async() else name)
        return found


Agent = LitAgent[Any] | RolloutFunction


def llm_rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """`@rollout` for a function that takes `llm`."""
    return _needing("llm", function)


def prompt_rollout(function: Callable[..., Any] | None = None) -> Any:
    """`@rollout` for a function that takes `prompt_template`."""
    return _needing("prompt_template", function)


def _needing(name: str, function: Callable[..., Any] | None) -> Any:
    def made(function: Callable[..., Any]) -> RolloutFunction:
        agent = rollout(function)
        if name not in agent.parameters:
            raise AgentSignatureError(f"{function.__name__} has no parameter {name!r}")
        return agent

    return made if function is None else made(function)


def as_agent(agent: Any) -> Agent:
    """Return the argument as an agent. Raises UserError if it isn't one."""
    if isinstance(agent, LitAgent | RolloutFunction):
        return agent
    if inspect.isfunction(agent):
        return rollout(agent)
    raise UserError(f"{agent!r:.100} is not an agent: pass a function decorated with @rollout, or a LitAgent")


def bound(
    agent: Agent, attempted: AttemptedRollout, resources: NamedResources
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what to call for a rollout of a store, and its arguments."""
    task = attempted.rollout.input
    if isinstance(agent, LitAgent):
        return agent.method(attempted.rollout.mode), {"task": task, "resources": resources, "rollout": attempted}
    values: dict[str, Any] = {"task": task, "rollout": attempted}
    for name in agent.parameters:
        if name in ("llm", "prompt_template"):
            values[name] = _first(resources, LLM if name == "llm" else PromptTemplate, name)
        elif name not in values:
            raise RolloutFunctionError(f"the parameter {name!r} is filled by a training run only, not from a store")
    return agent, {name: values[name] for name in agent.parameters}


def _first(resources: NamedResources, kind: type[Any], name: str) -> Any:
    """The first resource of a type, whatever its name."""
    found = [value for value in resources.values() if isinstance(value, kind)]
    if not found:
        raise MissingResourceError(
            f"the agent takes `{name}`, but there is no {kind.__name__} among the resources\n"
            f"    give one: Trainer(initial_resources={{'main': {kind.__name__}(…)}})"
        )
    if len(found) > 1:
        log.warning("%d resources are of type %s: the agent gets the first", len(found), kind.__name__)
    return found[0]


def workflow_of(agent: Agent) -> RolloutFunction | type[Workflow]:
    """The agent as a training run takes it."""
    if isinstance(agent, RolloutFunction):
        return agent

    async def execute(_: Workflow, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        endpoint = tuner.as_oai_baseurl_apikey()
        names = () if workflow_task.prompts is None else workflow_task.prompts.templates
        templates = {name: tuner.prompt(name) for name in names}
        resources = {"main_llm": LLM(endpoint.base_url, endpoint.model, endpoint.api_key), **templates}
        attempted = _as_attempt(workflow_task)
        returned = await called(agent.method(attempted.mode), attempted.input, resources, attempted)
        return output_of(type(agent).__name__, returned)

    kind = type(agent)
    return type(kind.__name__, (Workflow,), {"execute": execute, "__doc__": kind.__doc__, "__module__": __name__})


def _as_attempt(workflow_task: WorkflowTask) -> AttemptedRollout:
    """An episode of a run, as a store would tell of it."""
    episode, now = workflow_task.episode_uuid, time.time()
    mode: Mode = "val" if workflow_task.validation else "train"
    return AttemptedRollout(
        Rollout(
            rollout_id=episode,
            input=record_of(workflow_task),
            start_time=now,
            mode=mode,
            status=RolloutStatus.RUNNING,
        ),
        Attempt(rollout_id=episode, attempt_id=episode, sequence_id=1, start_time=now, status=AttemptStatus.RUNNING),
    )


class LitAgentRunner(Generic[T]):
    """`with runner.run_context(agent=…, store=…): await runner.step(task)`, or `await runner.iter()`."""

    def __init__(
        self,
        tracer: Tracer | None = None,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
    ) -> None:
        """`poll_interval`: the longest wait of one claim, after which `event` is looked at."""
        self.tracer = tracer or AgentOpsTracer()
        self._max_rollouts = max_rollouts
        self._wait_s, self._beat_s = max(poll_interval, SHORTEST_WAIT_S), heartbeat_interval
        self._agent: Agent | None = None
        self._store: LightningStore | None = None
        self._hooks: Sequence[Hook] = ()
        self._worker = "Worker-0"

    @contextmanager
    def run_context(
        self, *, agent: Any, store: LightningStore, hooks: Sequence[Hook] | None = None, worker_id: int | None = None
    ) -> Iterator[LitAgentRunner[T]]:
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
        async with self._agents_threads():
            error = await self._execute(started)
        if error is not None:
            raise error
        ended = await store.get_rollout_by_id(started.rollout.rollout_id)
        assert ended is not None
        return ended

    async def iter(self, *, event: Any = None) -> None:
        """Execute what is queued until `event` is set, or `max_rollouts` are done. An agent's errors are logged."""
        store, done = self._at_work()[1], 0
        async with self._agents_threads():
            while (event is None or not event.is_set()) and (self._max_rollouts is None or done < self._max_rollouts):
                for claimed in await store.dequeue_many_rollouts(worker_id=self._worker, wait_seconds=self._wait_s):
                    error = await self._execute(claimed)
                    if error is not None:
                        log.error("rollout %s failed", claimed.rollout.rollout_id, exc_info=error)
                    done += 1

    @asynccontextmanager
    async def _agents_threads(self) -> AsyncIterator[None]:
        """Threads of agents that are plain functions. One that outlives its attempt is interrupted, at the latest here
        at the end."""
        self._threads = EpisodeThreads(max_lost=sys.maxsize)
        try:
            yield
        finally:
            await self._threads.interrupt_all()

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
            await store.ours.report(reference.rollout_id, reference.attempt_id, status, result)
        await self._call_hooks("on_rollout_end", agent=agent, rollout=rollout, spans=spans)
        return error

    async def _work(
        self, agent: Agent, rollout: AttemptedRollout, store: LightningStore, spans: list[Span]
    ) -> BaseException | None:
        """Call the agent. Its spans are in `spans` as soon as they end. Returns what it raised."""
        assert rollout.attempt is not None
        ids: Any = {"rollout_id": rollout.rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        try:
            async with self.tracer.trace_context(sink=spans.append, **ids):
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
            # decorators of the user's stay: one may run the coroutine itself
            users = inspect.unwrap(function, stop=lambda each: not isinstance(each, RolloutFunction))
            if inspect.iscoroutinefunction(users):
                return await function(**arguments)
            returned = await self._in_thread(contextvars.copy_context(), function, arguments)
            return await returned if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:
            with suppress(NoRecordingError):
                emit_exception(error)
            raise

    async def _in_thread(self, context: contextvars.Context, function: Any, arguments: Mapping[str, Any]) -> Any:
        """Call it where no loop is running, so that it may run one itself, until the attempt is over."""
        thread = self._threads.start(lambda: call_off_loop(lambda: context.run(function, **arguments)))
        try:
            return await asyncio.wrap_future(thread.result)
        finally:
            self._threads.release(thread)

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
                    (attempt,) = await store.ours.heartbeat(self._worker, [reference])
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
    except StoreError as error:
        if len(spans) == 1:
            log.error("the span %r (%s) is not stored: %s", spans[0].name, spans[0].span_id, error)
            return
        for span in spans:
            await _store_spans(store, [span])
