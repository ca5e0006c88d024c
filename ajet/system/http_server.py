"""`HttpServer`: listens on an address and hands every request to a handler, within limits.

`await start(host, port, …)`, then `address.url` is where it is; `await aclose()` at the end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ajet.schema.errors import UserError
from ajet.system.http_messages import (
    INTERNAL_ERROR,
    Answer,
    AsgiApp,
    HttpHandler,
    HttpLimits,
    HttpRequest,
    Message,
    Receive,
    Send,
)

if TYPE_CHECKING:
    from ajet.system.http_protocol import Connections, HttpConnection

log = logging.getLogger(__name__)

BACKLOG = 2048
ACCEPT_AGAIN_S = 0.25
MAX_UNAUTHENTICATED_BODY = 65_536
"""The limit for a request that needs no key, for example a sign-in."""
FREE_BYTES = 65_536
"""A body may grow to this even while others fill the memory for bodies."""


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


def tls_context(certificate: str | Path | None, key: str | Path | None, settings: str) -> ssl.SSLContext | None:
    """What a server needs to speak TLS: PEM files with its certificate (and those that lead to a known authority) and
    its private key. None if neither is given. Raises AddressError, whose message names `settings`."""
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise AddressError(f"{settings} go together")
    for file in (certificate, key):
        if not Path(file).is_file():
            raise AddressError(f"{settings}: no file {file}")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
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
        self._accepting: asyncio.Task[None] | None = None
        self._address: Address | None = None
        self._buffered = 0
        """Bytes of bodies that are being received."""

    async def start(self, host: str, port: int, settings: str) -> None:
        """Listen. Raises AddressError, as `listen` does."""
        await self.start_on(listen(host, port, settings))

    async def start_on(self, listener: socket.socket) -> None:
        """Serve a socket that `listen` made."""
        from ajet.system.http_protocol import Connections  # uvicorn: only where something is served

        listener.setblocking(False)
        self._connections = Connections(self._respond, self._handler.refuse, self._limits)
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self._address = Address(host, port, "https" if self._tls else "http")
        self._accepting = asyncio.create_task(self._accept(listener, self._connections))

    async def _accept(self, listener: socket.socket, connections: Connections) -> None:
        """Take in clients, one at a time, so that those who are here are served meanwhile. asyncio's own server would
        take in all who wait, without bounds on how many there are."""
        loop = asyncio.get_running_loop()
        while True:
            await connections.wait_for_slot()
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:  # the process has no room for one more: nothing of ours can be done about it
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            connection = connections.accept()
            connection.arrival = asyncio.create_task(self._connect(client, connection))
            await asyncio.sleep(0)

    async def _connect(self, client: socket.socket, connection: HttpConnection) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                client,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.header_deadline_s if self._tls else None,
            )
        except (OSError, asyncio.CancelledError) as error:  # also of TLS; or another took its place
            log.debug("a connection ended before it began: %s", error)
            client.close()
            connection.leave()

    @property
    def address(self) -> Address:
        if self._address is None:
            raise RuntimeError("the server is not started")
        return self._address

    @property
    def connections(self) -> int:
        return len(self._connections) if self._connections is not None else 0

    async def aclose(self) -> None:
        """Stop listening and cut all connections; the work being done for them is cancelled."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._connections is not None:
            self._connections.abort()
        await asyncio.sleep(0)  # let the connections see their end

    # ------------------------------------------------------------ requests

    async def _respond(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI application that uvicorn calls: admit, read the body within limits, handle."""
        connection: HttpConnection = scope["ajet.connection"]
        if connection.gone:
            return
        places = connection.places
        connection.serving = asyncio.current_task()
        request = _request(scope)

        async def deliver(message: Message) -> None:
            if connection.gone:
                raise _ClientGoneError
            await send(message)

        try:
            incomplete = scope["ajet.cycle"].more_body
            reply: AsgiApp | None = await self._refusal(request, receive, connection, incomplete)
            if reply is None and not request.unauthenticated:
                places.move(connection, places.busy)
            reply = reply or await self._handled(request)
            if isinstance(reply, Answer) and isinstance(reply.body, bytes):
                if not connection.gone:
                    await connection.send_whole(scope["ajet.cycle"], reply)
            else:
                await reply(scope, _again(request.body, receive), deliver)
        except Exception:  # the answer is cut off, so that the client can't mistake it for a complete one
            if not connection.gone:
                log.exception("internal error while answering %s %s", request.method, request.path)
        finally:
            if connection in places.busy:
                places.move(connection, places.authenticated)

    async def _handled(self, request: HttpRequest) -> AsgiApp:
        try:
            return await self._handler.handle(request)
        except Exception:  # our fault: the client gets a 500, and the server lives on
            log.exception("internal error in %s %s", request.method, request.path)
            return self._handler.refuse(request, 500, "internal_error", INTERNAL_ERROR)

    async def _refusal(
        self, request: HttpRequest, receive: Receive, connection: HttpConnection, incomplete: bool
    ) -> Answer | None:
        """Read the request's body, which may be `incomplete` yet, unless it is refused."""
        if (answer := self._handler.admit(request)) is not None:
            return answer
        try:
            async with asyncio.timeout(self._limits.body_deadline_s if incomplete else None):
                await self._read_body(request, receive)
        except TimeoutError:
            return self._handler.refuse(request, 408, "request_timeout", "the request did not arrive in time")
        except _Refused as refused:
            return self._handler.refuse(request, *refused.args)
        if connection.refusal is not None:
            return self._handler.refuse(request, *connection.refusal)
        if connection.places.crowded:
            return self._handler.refuse(
                request, 429, "overloaded", "too many requests are in progress: try again later"
            )
        return None

    async def _read_body(self, request: HttpRequest, receive: Receive) -> None:
        most = MAX_UNAUTHENTICATED_BODY if request.unauthenticated else request.max_body
        limit = self._limits.max_body_bytes if most is None else min(self._limits.max_body_bytes, most)
        too_large = _Refused(413, "request_too_large", f"the body is larger than {limit} bytes")
        encoding = request.headers.get(b"content-encoding", b"identity")
        if encoding not in (b"identity", b"gzip", b"deflate"):
            raise _Refused(415, "unsupported_encoding", "content-encoding must be identity, gzip or deflate")
        length = request.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        body, more = bytearray(), True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientGoneError
                piece, more = message["body"], message["more_body"]
                body += piece
                self._buffered += len(piece)
                if len(body) > limit:
                    raise too_large
                if more and len(body) > FREE_BYTES and self._buffered > self._limits.max_buffered_bytes:
                    raise _Refused(
                        429, "overloaded", "the server is receiving too many large requests: try again later"
                    )
        finally:
            self._buffered -= len(body)
        request.body = bytes(body)
        if encoding != b"identity":
            request.body = await asyncio.to_thread(_decompressed, request.body, limit)


class _Refused(Exception):
    """A request is refused: status, code, message."""


class _ClientGoneError(OSError):
    """The client is gone. ASGI wants an OSError: it ends a stream that would never wait."""


def _request(scope: Message) -> HttpRequest:
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name, value)
    path = scope["raw_path"].decode("latin-1")
    return HttpRequest(scope["method"], path, scope["query_string"], headers, client=scope["client"])


def _decompressed(body: bytes, limit: int) -> bytes:
    inflate = zlib.decompressobj(47)  # gzip or zlib, as its header says
    try:
        whole = inflate.decompress(body, limit + 1)
    except zlib.error as error:
        message = f"the body does not match its content-encoding: {error}"
        raise _Refused(400, "invalid_request", message) from None
    if len(whole) > limit:
        raise _Refused(413, "request_too_large", f"the body is larger than {limit} bytes when decompressed")
    if not inflate.eof:
        raise _Refused(400, "invalid_request", "the compressed body is cut short")
    return whole


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` for an application that reads a body which has been read before."""
    given = False

    async def read() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read


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
