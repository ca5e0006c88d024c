"""`Control`: requests to the first process inside a sandbox (`inside.py`), and its answers.

Answers come from a place where model-written code runs: they are a number and a word, and whatever else arrives ends
the sandbox.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence

from ajet.environment.sandboxes.sandbox import SandboxError

PACKET = 64
RETRY_S = 0.005


class Answer:
    """`exit 0`, `error 13`, or `socket` with a descriptor."""

    def __init__(self, text: str, descriptor: int | None = None) -> None:
        self.kind, _, value = text.partition(" ")
        self.value = int(value) if value else 0
        self.descriptor = descriptor


class Control:
    """The owner's end of the channel."""

    def __init__(self, ours: socket.socket, on_end: Callable[[], str]) -> None:
        """`on_end` says why the sandbox ended, once it has."""
        self._socket = ours
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours, self._receive)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {0: self._loop.create_future()}
        self._on_end = on_end
        self._ended: str | None = None

    async def ready(self) -> None:
        """Wait until the first process is there."""
        await self._waiting[0]

    @property
    def ended(self) -> bool:
        """Whether the other end is gone."""
        return self._ended is not None

    async def begin(
        self, action: str, fields: Sequence[str], descriptors: Sequence[int]
    ) -> tuple[int, asyncio.Future[Answer]]:
        """Send a request. The future is its answer; `SandboxError` if the sandbox ends before."""
        payload = os.memfd_create("ajet-request")
        try:
            with open(payload, "wb", closefd=False) as file:
                file.write(b"\0".join(os.fsencode(field) for field in fields))
            os.lseek(payload, 0, os.SEEK_SET)
            number = next(self._numbers)
            answer: asyncio.Future[Answer] = self._loop.create_future()
            self._waiting[number] = answer
            await self._send(f"{number} {action}", [payload, *descriptors])
        finally:
            os.close(payload)
        return number, answer

    async def kill(self, number: int) -> None:
        """End what this request started."""
        await self._send(f"{number} kill", [])

    async def _send(self, text: str, descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        while True:
            if self._ended is not None:
                raise SandboxError(self._ended)
            try:
                self._socket.sendmsg([text.encode()], rights)
            except BlockingIOError:
                await asyncio.sleep(RETRY_S)
            except OSError:
                self._end()
            else:
                return

    def hang_up(self) -> None:
        """Have the first process exit. Can be called from any thread."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. On the event loop."""
        self._end("the sandbox is closed")
        self._socket.close()

    def _receive(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._socket, PACKET, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        number, _, text = packet.decode("ascii", "replace").partition(" ")
        try:
            answer = Answer(text, descriptors[0] if descriptors else None)
            waiting = self._waiting.pop(int(number)) if number != "0" else self._waiting[0]
        except (ValueError, KeyError):
            for descriptor in descriptors:
                os.close(descriptor)
            self._end()
            return
        if number == "0" and text == "lifetime":
            self._end("the sandbox reached its lifetime_seconds and was closed")
        elif not waiting.done():
            waiting.set_result(answer)

    def _end(self, why: str | None = None) -> None:
        if self._ended is not None:
            return
        self._loop.remove_reader(self._socket)
        self._ended = why or self._on_end()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(SandboxError(self._ended))
                waiting.exception()  # a request may have been given up
