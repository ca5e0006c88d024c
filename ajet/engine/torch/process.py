"""The program of an engine's process: an embedded engine over weights that another process owns.

    python -m ajet.engine.torch.process DESCRIPTOR OWNER

`DESCRIPTOR` is its end of the socket pair, `OWNER` the process that started it. It ends when the other end is closed,
and at once when the owner is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import suppress
from typing import Any

import torch

from ajet.engine.model_source import ModelSource
from ajet.engine.torch.engine import TorchEngine, TorchEngineSettings
from ajet.engine.torch.process_messages import (
    ORDERS,
    Ask,
    Count,
    Done,
    Drop,
    Event,
    Failed,
    Order,
    Refused,
    Reply,
    Said,
    Serve,
    Start,
    Tokens,
    Up,
    frame,
    named,
    read_frame,
    unpacked,
)
from ajet.engine.torch.shared_weights import use_shared
from ajet.system.parent import die_with


class Server:
    """Carries out orders on its loop; a thread reads them from the socket."""

    def __init__(self, engine: TorchEngine, end: socket.socket) -> None:
        self._engine = engine
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: list[Event] = []

    async def serve(self) -> None:
        """Until the other end is closed."""
        self._tell(Up())
        logging.getLogger("ajet").addHandler(_Teller(self))
        await self._loop.run_in_executor(None, self._read_all)

    def _read_all(self) -> None:
        while (body := read_frame(self._end)) is not None:
            self._loop.call_soon_threadsafe(self._carry_out, ORDERS.decode(body))

    def _carry_out(self, order: Order) -> None:
        match order:
            case Ask(number=number):
                self._begin(number, self._reply(order))
            case Drop(number=number):
                task = self._tasks.get(number)
                if task is not None:
                    task.cancel()
            case Serve(number=number):
                self._begin(number, self._serve(order))
            case Count(number=number):
                self._begin(number, self._count(order))

    def _begin(self, number: int, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _reply(self, order: Ask) -> None:
        number = order.number
        on_tokens = None
        if order.streams:
            on_tokens = lambda chunk: self._tell(Tokens(number, chunk.token_ids, chunk.logprobs))  # noqa: E731
        try:
            self._tell(Reply(number, await self._engine.generate(unpacked(order.request), on_tokens)))
        except Exception as error:  # noqa: BLE001 - the one who asked gets it
            self._tell(Failed(number, *named(error)))

    async def _serve(self, order: Serve) -> None:
        try:
            await self._engine.load_weights(None, order.version)
            self._tell(Done(order.number))
        except Exception as error:  # noqa: BLE001 - the one who asked gets it
            self._tell(Failed(order.number, *named(error)))

    async def _count(self, order: Count) -> None:
        try:
            self._tell(Done(order.number, await self._engine.stats()))
        except Exception as error:  # noqa: BLE001 - the one who asked gets it
            self._tell(Failed(order.number, *named(error)))

    def say(self, level: int, message: str) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._tell, Said(level, message))

    def _tell(self, event: Event) -> None:
        """What happens in one turn of the loop goes out together."""
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(event)

    def _send(self) -> None:
        events, self._unsent = self._unsent, []
        try:
            self._end.sendall(frame(events))
        except OSError:
            return  # nobody is there any more; the reading thread sees it too


class _Teller(logging.Handler):
    """Warnings belong into the owner's log: this process has none."""

    def __init__(self, server: Server) -> None:
        super().__init__(logging.WARNING)
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        self._server.say(record.levelno, self.format(record))


async def run(end: socket.socket) -> None:
    """Load, say so, serve."""
    body = read_frame(end)
    if body is None:
        return
    start = ORDERS.decode(body)
    assert isinstance(start, Start)
    try:
        settings = TorchEngineSettings(**start.settings)
        if settings.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(1)  # see `compute_alone`
        model = ModelSource.resolve(start.model).model(settings.dtype, settings.attn, "cpu")
        use_shared(model, start.descriptor, start.layout)
        os.close(start.descriptor)
        torch.set_num_threads(start.cpu_threads)
        engine = TorchEngine(model, settings)
        await engine.ready()
        await engine.load_weights(None, start.version)
    except Exception as error:  # noqa: BLE001 - the owner raises it
        with suppress(OSError):  # nobody is there any more
            end.sendall(frame([Refused(*named(error))]))
        return
    await Server(engine, end).serve()


def main() -> None:
    descriptor, owner = map(int, sys.argv[1:])
    die_with(owner)
    asyncio.run(run(socket.socket(fileno=descriptor)))
    sys.stdout.flush()
    os._exit(0)  # a step that is under way needs no waiting for: nobody is there for its result


if __name__ == "__main__":
    main()
