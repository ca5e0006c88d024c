"""`TorchEngine`: the embedded engine as the rest of the program sees it, a front to a thread (`worker`).

The thread starts at once and loads the model while the caller goes on. Everything from outside reaches it as a message
in its inbox, which it empties between steps. So nothing else touches model and scheduler, except a trainer between
`pause` and `resume`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.engine.base import EnginePlacement, OnTokens, reply_deadline
from ajet.engine.model_source import LOADING, ModelSource
from ajet.engine.torch.commands import Inbox, Ticket, TorchEngineSettings
from ajet.schema.chat import Completion, EngineCapabilities, GenerateRequest
from ajet.schema.errors import AjetError, EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet.engine.torch.worker import EngineThread

    Servable = str | Path | ModelSource | PreTrainedModel
    """What an engine may be given as its model."""

log = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
"""How long closing waits for the step in progress."""


class TorchEngine:
    """Continuous batching over a Hugging Face model in this process."""

    @classmethod
    def from_config(cls, config: Any, placement: EnginePlacement) -> TorchEngine:
        """Read `ajet.model` and `ajet.rollout`."""
        settings = TorchEngineSettings.from_config(config)
        settings = replace(settings, device=placement.device, base_bits=placement.base_bits)
        return cls(config.ajet.model.path, settings)

    def __init__(self, model: Servable, settings: TorchEngineSettings) -> None:
        self._settings = settings
        self._inbox: Inbox = queue.SimpleQueue()
        self._loaded: Future[EngineThread] = Future()
        self._thread = threading.Thread(target=_live, args=(model, settings, self._inbox, self._loaded), daemon=True)
        self._thread.name = "ajet-engine"
        self._thread.start()
        weakref.finalize(self, _close, self._inbox, self._thread)

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("torch", load_weights=True, max_model_len=self._settings.max_model_len)

    @property
    def model(self) -> PreTrainedModel:
        """The served model. To change its parameters, `pause`, change them, `load_weights(None, version)`, `resume`."""
        return self._worker().runner.model

    @property
    def cpu_threads(self) -> int:
        """How many threads a trainer may use while the engine is paused; the engine itself may use fewer."""
        return self._worker().cpu_threads

    def _worker(self) -> EngineThread:
        if not self._loaded.done():
            raise EngineError("the model is still loading: await engine.ready() first")
        return self._loaded.result()

    async def ready(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        async with reply_deadline(request):
            await self.ready()
            loop = asyncio.get_running_loop()
            ticket = Ticket(request, loop, loop.create_future(), on_tokens)
            self._send(lambda worker: worker.submit(ticket))
            try:
                return await ticket.answer
            except asyncio.CancelledError:
                self._inbox.put(lambda worker: worker.cancel(ticket))
                raise

    async def load_weights(self, source: Any, version: int) -> None:
        """Serve other weights: a state dict, a folder of safetensors, or None if they were changed in place."""
        await self.ready()
        await self._ask(lambda worker: worker.load_weights(source, version))

    async def pause(self) -> None:
        await self.ready()
        done: Future[None] = Future()
        self._send(lambda worker: worker.pause(done))
        await asyncio.wrap_future(done)

    async def resume(self) -> None:
        self._send(lambda worker: worker.resume())

    async def stats(self) -> dict[str, int]:
        """What was computed, what is cached, what is in flight: for tests and benchmarks."""
        await self.ready()
        stats: dict[str, int] = await self._ask(lambda worker: worker.stats())
        return stats

    async def aclose(self) -> None:
        self._inbox.put(lambda worker: worker.close())
        if self._loaded.done():  # loading can't be interrupted: the thread ends after it, or with the interpreter
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    async def _ask(self, action: Callable[[EngineThread], Any]) -> Any:
        """Have the thread do this between two steps; returns what it returns."""
        done: Future[Any] = Future()
        self._send(lambda worker: worker.answer(action, done))
        return await asyncio.wrap_future(done)

    def _send(self, message: Callable[[EngineThread], None]) -> None:
        self._check_alive()
        self._inbox.put(message)
        self._check_alive()  # the thread may have emptied its inbox for the last time meanwhile

    def _check_alive(self) -> None:
        if self._loaded.done() and (death := self._loaded.result().death) is not None:
            raise EngineError(str(death)) from death


def _live(model: Servable, settings: TorchEngineSettings, inbox: Inbox, loaded: Future[EngineThread]) -> None:
    """The thread: load, serve, and fail everything that still waits when it ends."""
    try:
        worker = _load(model, settings, inbox)
    except Exception as error:  # noqa: BLE001 - `ready` raises it
        failure = error if isinstance(error, AjetError) else EngineError(f"the model could not be loaded: {error!r}")
        loaded.set_exception(failure)
        return
    loaded.set_result(worker)
    death = EngineError("it is closed")
    try:
        worker.run()
    except Exception as error:  # whatever ends the thread, those who wait for it must learn of it
        log.exception("the embedded engine died")
        death = error if isinstance(error, EngineError) else EngineError(repr(error))
    worker.die(EngineError(f"the embedded engine has ended: {death}"))


def _load(model: Servable, settings: TorchEngineSettings, inbox: Inbox) -> EngineThread:
    with LOADING:
        from ajet.engine.torch.worker import EngineThread, compute_alone

    cpu_threads = compute_alone()
    if isinstance(model, str | Path):
        model = ModelSource.resolve(model)
    if isinstance(model, ModelSource):
        source, weights = model, model.model(settings.dtype, settings.attn, settings.device, settings.base_bits)
    else:
        source, weights = ModelSource.resolve(str(model.config.name_or_path)), model
    return EngineThread(weights, source.tokenizer(), settings, inbox, cpu_threads)


def _close(inbox: Inbox, thread: threading.Thread) -> None:
    """Runs when the engine is dropped or the interpreter ends: by then torch must not be computing."""
    inbox.put(lambda worker: worker.close())
    if thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
