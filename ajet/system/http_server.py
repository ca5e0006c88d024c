"""`HttpServer`: listens on an address and hands every request to a handler, within limits.

`await start(host, port, …)`, then `address.url` is where it is; `await aclose()` at the end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import NamedTuple

from ajet.schema.errors import UserError
from ajet.system.http.connections import Connections
from ajet.system.http_protocol import HttpConnection, HttpHandler, HttpLimits

log = logging.getLogger(__name__)

BACKLOG = 2048
ACCEPTED_AT_ONCE = 16
ACCEPT_AGAIN_S = 0.25
SWEEP_S = 0.25
"""How often deadlines are checked: small compared with any deadline worth setting."""


class AddressError(UserError):
    """An address that a server can't, or mustn't, listen on."""


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """`http://host:port`, as a client on this machine can use it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://[{host}]:{self.port}" if ":" in host else f"{self.scheme}://{host}:{self.port}"


def tls_context(certificate: str | Path, key: str | Path, settings: str) -> ssl.SSLContext:
    """What a server needs to speak TLS: PEM files with its certificate (and those that lead to a known authority) and
    its private key. Raises AddressError, whose message names `settings`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for file in (certificate, key):
        if not Path(file).is_file():
            raise AddressError(f"{settings}: no file {file}")
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise AddressError(
            f"{settings}: {certificate} and {key} are not a certificate and its private key in PEM form "
            f"(without a passphrase): {error}"
        ) from error
    return context


class HttpServer:
    """Serves one handler on the running event loop."""

    def __init__(
        self, handler: HttpHandler, limits: HttpLimits | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls` (see `tls_context`): speak HTTPS, and nothing else."""
        self._handler = handler
        self._limits = limits or HttpLimits()
        self._tls = tls
        self._connections: Connections | None = None
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._address: Address | None = None

    async def start(self, host: str, port: int, settings: str) -> None:
        """Listen. Raises AddressError, as `listen` does."""
        await self.start_on(listen(host, port, settings))

    async def start_on(self, listener: socket.socket) -> None:
        """Serve a socket that `listen` made."""
        shared = self._connections = Connections(self._handler, self._limits)
        listener.setblocking(False)
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self._address = Address(host, port, "https" if self._tls else "http")
        self._tasks = [asyncio.create_task(_sweep(shared)), asyncio.create_task(self._accept(listener, shared))]

    async def _accept(self, listener: socket.socket, shared: Connections) -> None:
        """Take in clients, a few at a time, so that those who are here are served meanwhile."""
        accepted = 0
        while True:
            await shared.room()
            try:
                client, _ = await shared.loop.sock_accept(listener)
            except OSError as error:  # the process has no room for one more: nothing of ours can be done about it
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            shared.arrive(asyncio.create_task(self._connect(client, shared)))
            accepted += 1
            if accepted % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _connect(self, client: socket.socket, shared: Connections) -> None:
        try:
            await shared.loop.connect_accepted_socket(
                lambda: HttpConnection(shared),
                client,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.header_deadline_s if self._tls else None,
            )
        except OSError as error:  # also of TLS
            log.debug("a connection ended before it began: %s", error)
            client.close()

    @property
    def address(self) -> Address:
        if self._address is None:
            raise RuntimeError("the server is not started")
        return self._address

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._connections) if self._connections is not None else 0

    async def aclose(self) -> None:
        """Stop listening and cut all connections; the work being done for them is cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._connections is not None:
            self._connections.abort()
        await asyncio.sleep(0)  # let the connections see their end


async def _sweep(connections: Connections) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        connections.sweep()


def listen(host: str, port: int, settings: str) -> socket.socket:
    """A listening socket: clients can connect at once, and wait until a server starts on it. Port 0: any free one.

    Raises AddressError, whose message tells the user to change `settings` ("--host or --port", say).
    """
    if not 0 <= port <= 65535:  # getaddrinfo would wrap it around
        raise _address_error(host, port, "a port is a number from 0 to 65535", settings)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # with the protocol named, asyncio turns Nagle's algorithm off; otherwise small answers wait up to 40 ms
        listener = socket.socket(family, kind, protocol or socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise _address_error(host, port, error, settings) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _address_error(host, port, error, settings) from error
    return listener


def _address_error(host: str, port: int, reason: object, settings: str) -> AddressError:
    if isinstance(reason, OSError) and reason.strerror:
        reason = reason.strerror
    return AddressError(f"can't listen on {host}:{port}: {reason}. Change {settings} (port 0: any free one)")
