"""`TorchProcessEngine`: the embedded engine in a process of its own, over weights in shared memory.

The engine's loop then shares no interpreter lock with workflows, sessions and gateway. This side holds the model that a
trainer changes in place; the process (`process`) computes replies with the same memory. A thread starts the process,
reads what it sends and, if it dies, starts it again with the newest weights, a limited number of times. Replies that
were in flight then fail with a typed error, and the pool runs their episodes again; later requests wait.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import weakref
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ajet.engine.base import OnTokens
from ajet.engine.model_source import LOADING, ModelSource
from ajet.engine.sampling_rules import check_request
from ajet.engine.torch.engine import JOIN_SECONDS, Ticket, TorchEngineSettings
from ajet.schema.errors import AjetError, EngineError, GenerationTimeoutError
from ajet.schema.generation import Completion, EngineCapabilities, GenerateRequest, TokenChunk

if TYPE_CHECKING:
    import msgspec
    from transformers import PreTrainedModel

    from ajet.engine.torch.child import Child
    from ajet.engine.torch.process_messages import Event
    from ajet.engine.torch.shared_weights import SharedWeights

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""After so many, the next death ends the engine: whatever kills it will do so again."""


class TorchProcessEngine:
    """An `Engine` whose thread lives in another process."""

    def __init__(self, model: str, settings: TorchEngineSettings) -> None:
        self._state = _State(model, settings)
        self._thread = threading.Thread(target=_live, args=(self._state,), name="ajet-engine-process", daemon=True)
        self._thread.start()
        weakref.finalize(self, _close, self._state, self._thread)

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("torch", load_weights=True, max_model_len=self._state.settings.max_model_len)

    @property
    def model(self) -> PreTrainedModel:
        """The served model. To change its parameters, `pause`, change them in place, `load_weights(None, version)`,
        `resume`."""
        if not self._state.ready.done():
            raise EngineError("the model is still loading: await engine.ready() first")
        self._state.ready.result()
        return self._state.loaded.result()

    @property
    def cpu_threads(self) -> int:
        """How many threads a trainer may use while the engine is paused."""
        return self._state.cpu_threads

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        child = self._state.child
        return None if child is None else child.process.pid

    async def ready(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._state.ready))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        state = self._state
        try:
            async with asyncio.timeout(request.deadline_s):
                await self.ready()
                from ajet.engine.torch.process_messages import packed

                check_request(request, max_model_len=state.settings.max_model_len, vocabulary=state.vocabulary)
                loop = asyncio.get_running_loop()
                ticket = Ticket(request, loop, loop.create_future(), on_tokens)
                number = state.submit(ticket, packed(request))
                try:
                    return await ticket.answer
                finally:
                    state.forget(number)
        except TimeoutError as error:
            raise GenerationTimeoutError(f"no reply within its deadline of {request.deadline_s:.1f} s") from error

    async def load_weights(self, source: Any, version: int) -> None:
        """Serve other weights: a state dict, a folder of safetensors, or None if they were changed in place. A process
        that dies meanwhile comes back with them."""
        await self.ready()
        if source is None:
            await self._state.serve(version)
            return
        from ajet.engine.torch.worker import load_into

        paused = self._state.paused
        await self.pause()
        try:
            await asyncio.to_thread(load_into, self.model, source)
            await self._state.serve(version)
        finally:
            if not paused:
                await self.resume()

    async def pause(self) -> None:
        await self.ready()
        await asyncio.shield(asyncio.wrap_future(self._state.pause()))

    async def resume(self) -> None:
        self._state.resume()

    async def stats(self) -> dict[str, int]:
        """What was computed, what is cached, what is in flight: for tests and benchmarks."""
        await self.ready()
        return await self._state.count()

    async def aclose(self) -> None:
        await asyncio.to_thread(_close, self._state, self._thread)


class _State:
    """What loops and the thread share, under one lock."""

    def __init__(self, model: str, settings: TorchEngineSettings) -> None:
        self.name = model
        self.settings = settings
        self.loaded: Future[PreTrainedModel] = Future()
        self.ready: Future[None] = Future()
        """Done once the first process serves. It stays done when a process is started again."""
        self.cpu_threads = 1
        self.vocabulary = 0
        self.child: Child | None = None
        """Of the process that serves or is being started."""
        self.up = False
        self.starting = True
        """Whether a process is loading: it tries the weights then, so they must not change."""
        self.paused = False
        self._closed = False
        self.version = 0
        self.shared: SharedWeights | None = None
        self._dead: Exception | None = None
        self._lock = threading.Lock()
        self._resumed = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._held: dict[int, tuple[Ticket, msgspec.Raw]] = {}
        """Not sent yet: the engine is paused, or its process is being started."""
        self._sent: dict[int, Ticket] = {}
        self._pauses: list[Future[None]] = []
        self._commands: dict[int, Future[dict[str, int]]] = {}

    # ------------------------------------------------------------ from loops

    def submit(self, ticket: Ticket, request: msgspec.Raw) -> int:
        with self._lock:
            self._check_alive()
            number = next(self._numbers)
            if self.up and not self.paused:
                self._send(number, ticket, request)
            else:
                self._held[number] = ticket, request
            return number

    def forget(self, number: int) -> None:
        """Nobody waits for this reply any more, or it has come."""
        from ajet.engine.torch.process_messages import Drop

        with self._lock:
            self._held.pop(number, None)
            if self._sent.pop(number, None) is not None and self.child is not None:
                self.child.send(Drop(number))
            self._finish_pauses()

    async def serve(self, version: int) -> None:
        """The weights are this version from now on. A process that isn't up learns it when it starts."""
        from ajet.engine.torch.process_messages import Serve

        assert self.shared is not None
        self.shared.check(self.loaded.result())
        with self._lock:
            self._check_alive()
            self.version = version
            done = self._command(lambda number: Serve(number, version))
        if done is not None:
            await asyncio.shield(asyncio.wrap_future(done))

    async def count(self) -> dict[str, int]:
        from ajet.engine.torch.process_messages import Count

        with self._lock:
            self._check_alive()
            done = self._command(Count)
        return {} if done is None else await asyncio.shield(asyncio.wrap_future(done))

    def _command(self, order: Any) -> Future[dict[str, int]] | None:
        if not self.up or self.child is None:
            return None
        number = next(self._numbers)
        done: Future[dict[str, int]] = Future()
        self._commands[number] = done
        self.child.send(order(number))
        return done

    def pause(self) -> Future[None]:
        """Send no more requests. The future is done when none is in flight and no process is starting."""
        done: Future[None] = Future()
        with self._lock:
            self._check_alive()
            self.paused = True
            self._pauses.append(done)
            self._finish_pauses()
        return done

    def resume(self) -> None:
        with self._lock:
            self._check_alive()
            self.paused = False
            if self.up:
                self._send_held()
            self._resumed.notify_all()

    def is_closed(self) -> bool:
        with self._lock:
            return self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._resumed.notify_all()
            child = self.child
        if child is not None:
            child.hang_up()

    # ------------------------------------------------------------ from the thread

    def came_up(self, version: int) -> None:
        """The process serves now, with the version that it was told at its start."""
        from ajet.engine.torch.process_messages import Serve

        with self._lock:
            self.up, self.starting = True, False
            if version != self.version:
                self._command(lambda number: Serve(number, self.version))
            if not self.paused:
                self._send_held()
            self._finish_pauses()
        if not self.ready.done():
            self.ready.set_result(None)

    def carry(self, events: list[Event], outbox: Any) -> None:
        """Deliver what the process sent."""
        from ajet.engine.torch.process_messages import Done, Failed, Reply, Said, Tokens, raised

        with self._lock:
            for event in events:
                match event:
                    case Said(level, message):
                        log.log(level, "the embedded engine's process: %s", message)
                    case Tokens(number, ids, logprobs) if number in self._sent:
                        outbox.chunk(self._sent[number], TokenChunk(ids, logprobs))
                    case Reply(number, completion) if number in self._sent:
                        outbox.complete(self._sent.pop(number), completion)
                    case Failed(number, kind, message) if number in self._sent:
                        outbox.fail(self._sent.pop(number), raised(kind, message))
                    case Failed(number, kind, message) if number in self._commands:
                        self._commands.pop(number).set_exception(raised(kind, message))
                    case Done(number, counters) if number in self._commands:
                        self._commands.pop(number).set_result(counters)
            self._finish_pauses()
        outbox.flush()

    def went_down(self, why: EngineError, outbox: Any, *, for_good: bool) -> None:
        """The process is gone: what it was doing fails. For good: everything does, from now on."""
        with self._lock:
            self.up = self.starting = False
            lost = list(self._sent.values())
            self._sent.clear()
            if for_good:
                self._dead = why
                lost += [ticket for ticket, _ in self._held.values()]
                self._held.clear()
            for ticket in lost:
                outbox.fail(ticket, why)
            for command in self._commands.values():
                command.set_result({})  # the next process starts with the newest version
            self._commands.clear()
            self._finish_pauses()
        outbox.flush()

    def start_when_resumed(self) -> None:
        """While the engine is paused, weights may change: no process can start."""
        with self._lock:
            self._resumed.wait_for(lambda: self._closed or not self.paused)
            self.starting = True

    # ------------------------------------------------------------ under the lock

    def _send(self, number: int, ticket: Ticket, request: msgspec.Raw) -> None:
        from ajet.engine.torch.process_messages import Ask

        assert self.child is not None
        self._sent[number] = ticket
        self.child.send(Ask(number, request, ticket.on_tokens is not None))

    def _send_held(self) -> None:
        held, self._held = self._held, {}
        for number, (ticket, request) in held.items():
            self._send(number, ticket, request)

    def _finish_pauses(self) -> None:
        if not self._sent and not self.starting:
            for pause in self._pauses:
                pause.set_result(None)
            self._pauses.clear()

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineError("the embedded engine has ended: the engine is closed")
        if self._dead is not None:
            raise EngineError(f"the embedded engine has ended: {self._dead}") from self._dead


def _live(state: _State) -> None:
    """The thread: load, share, start the process, and start it again when it dies."""
    try:
        with LOADING:
            from ajet.engine.torch.shared_weights import SharedWeights
            from ajet.engine.torch.worker import Outbox, compute_alone
        state.cpu_threads = compute_alone()
        settings = state.settings
        _refuse_gpu(settings.device)
        model = ModelSource.resolve(state.name).model(settings.dtype, settings.attn, settings.device)
        state.vocabulary = int(model.config.get_text_config().vocab_size)
        state.shared = shared = SharedWeights(model)
        state.loaded.set_result(model)
    except Exception as error:  # noqa: BLE001 - `ready` raises it
        failure = error if isinstance(error, AjetError) else EngineError(f"the model could not be loaded: {error!r}")
        state.ready.set_exception(failure)
        return
    outbox = Outbox()
    try:
        _keep_running(state, shared, outbox)
    except Exception as error:  # whatever ends the thread, those who wait for it must learn of it
        log.exception("the embedded engine died")
        failure = error if isinstance(error, AjetError) else EngineError(repr(error))
        state.went_down(EngineError(str(failure)), outbox, for_good=True)
        if not state.ready.done():
            state.ready.set_exception(failure)
    finally:
        if state.child is not None:
            state.child.end_it(at_once=True)
        shared.close()


def _refuse_gpu(device: str | None) -> None:
    import torch

    if not hasattr(os, "memfd_create"):
        raise EngineError("rollout.engine_process needs Linux's shared memory without a name: leave engine_process out")
    if device != "cpu" and (device is not None or torch.cuda.is_available()):
        raise EngineError(
            f"rollout.engine_process shares weights in main memory, and the model would be on {device or 'the GPU'}: "
            "leave engine_process out"
        )


def _keep_running(state: _State, shared: SharedWeights, outbox: Any) -> None:
    starts = 0
    while not state.is_closed():
        starts += 1
        how = _run_once(state, shared, outbox, starts)
        if state.is_closed():
            break
        why = EngineError(f"the embedded engine's process {how} while it was computing this reply")
        if starts > MAX_RESTARTS:
            raise EngineError(f"its process {how} after {starts} starts")
        log.warning("the embedded engine's process %s: starting it again with the newest weights", how)
        state.went_down(why, outbox, for_good=False)
        state.start_when_resumed()
    state.went_down(EngineError("the embedded engine has ended: it is closed"), outbox, for_good=True)
    if not state.ready.done():
        state.ready.set_exception(EngineError("the engine is closed"))


def _run_once(state: _State, shared: SharedWeights, outbox: Any, start: int) -> str:
    """One process, until it is gone. Returns how it ended; raises what it refused."""
    from ajet.engine.torch.child import Child
    from ajet.engine.torch.process_messages import EVENTS, Refused, Start, Up, raised, read_frame

    child = state.child = Child(shared)
    if state.is_closed():
        child.hang_up()
    version = state.version
    # a process that comes back must not draw the same random numbers for requests without a seed once more
    settings = asdict(replace(state.settings, seed=state.settings.seed + start - 1))
    child.send(Start(state.name, settings, state.cpu_threads, shared.descriptor, shared.layout, version))
    while (body := read_frame(child.end)) is not None:
        events = EVENTS.decode(body)
        for event in events:
            if isinstance(event, Refused):
                raise raised(event.kind, event.message)
            if isinstance(event, Up):
                state.came_up(version)
        state.carry(events, outbox)
    return child.end_it(at_once=state.is_closed() and not state.up)  # nobody needs what it is loading


def _close(state: _State, thread: threading.Thread) -> None:
    """Also runs when the engine is dropped or the interpreter ends."""
    state.close()
    if thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
