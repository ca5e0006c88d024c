"""`Forwarder`: lets programs in a sandbox without network reach the run's gateway, and nothing else.

The listening socket was opened inside, on the sandbox's own loopback; connections to it are accepted out here and
passed on to one address, which was fixed before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ajet.environment.sandboxes.sandbox import SandboxError, SandboxSettings

CHUNK = 1 << 16
MOST_CONNECTIONS = 128
"""The most that a sandbox has at a time, twice as many as the gateway answers. Each takes three of the run's files."""
MOST_WAITING = 1024
"""Further ones wait, and take no file: as many as requests of one episode wait in the gateway."""
NO_FILE_S = 1.0
"""How long it waits where the run has no file left for a connection."""
OPEN_PORTS = 1024
"""Below it, only root may listen; then another port is used inside."""
OTHER_PORT = 8080
NETWORKS = {"none": "namespace", "gateway": "namespace, with the gateway's port", "host": "not limited"}
"""What holds a sandbox's network, by its setting."""
ENTER_S = 30.0
"""How long it may take to enter a container's network."""


class Forwarder:
    """Passes connections on to the gateway."""

    def __init__(self, gateway_url: str) -> None:
        parts = urlsplit(gateway_url)
        if parts.scheme != "http" or not parts.hostname:
            raise SandboxError(f"network: gateway needs the gateway's http address, not {gateway_url!r}")
        self._host = parts.hostname
        self._port = parts.port or 80
        self.port = self._port if self._port >= OPEN_PORTS else OTHER_PORT
        """The port inside."""
        self.url = urlunsplit(parts._replace(netloc=f"127.0.0.1:{self.port}"))
        """The gateway's address inside."""
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, settings: SandboxSettings, gateway_url: str | None) -> Forwarder | None:
        """None: the sandbox doesn't reach the gateway. Raises `SandboxError`."""
        if settings.network != "gateway":
            return None
        if gateway_url is None:
            raise SandboxError("sandbox network: gateway: there is no gateway here; use network: none or host")
        return cls(gateway_url)

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections on `listener`, until `close`."""
        listener.setblocking(False)
        listener.listen(MOST_WAITING)
        self._start(self._accept(listener))

    def close(self) -> None:
        """End it, and every connection."""
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                await self._room.acquire()
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError:
                    self._room.release()
                    await asyncio.sleep(NO_FILE_S)
                    continue
                self._start(self._serve(connection)).add_done_callback(lambda _: self._room.release())

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            await self._join(reader, writer)
        finally:
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            gateway_reader, gateway_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return  # the connection closes, as if the gateway had refused it
        try:
            await asyncio.gather(_copy(reader, gateway_writer), _copy(gateway_reader, writer))
        finally:
            gateway_writer.close()


_LISTEN = """
import array, socket, sys
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(sys.argv[1])))
server.listen(128)
socket.send_fds(socket.socket(fileno=int(sys.argv[2])), [b"x"], [server.fileno()])
"""


def listen_inside(process: int, port: int) -> socket.socket:
    """A listening socket in the network of another process, a container's. Raises `SandboxError`."""
    ours, theirs = socket.socketpair()
    # as another user than root, the container is in a user namespace of ours, which is entered along with its network
    namespaces = ["--net"] if os.geteuid() == 0 else ["--user", "--preserve-credentials", "--net"]
    line = ["nsenter", "--target", str(process), *namespaces, "--", sys.executable, "-I", "-S", "-c", _LISTEN]
    with ours, theirs:
        line += [str(port), str(theirs.fileno())]
        try:
            done = subprocess.run(line, pass_fds=[theirs.fileno()], capture_output=True, check=False, timeout=ENTER_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"network: gateway: the container's network can't be entered: {error}") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise SandboxError(f"network: gateway: the container's network can't be entered: {said}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptors[0])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # one of the two has closed: so does the other
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
