"""Requests over HTTP with a deadline and a largest answer: `HttpClient` (blocking) and `BoundedClient` (asyncio).

Every request has one deadline for all of it, and a largest answer; a server that sends slowly or without end can't hold
its caller. An error says whether the request may have reached the server: only if not is it safe to send it again.
No redirects, no proxies.

Given `if_silent`, which says what happens then, both name on the terminal a server that sends nothing for `SILENT_S`
while a request waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import httpx

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""A reply of 100,000 tokens with their ids and 20 likeliest alternatives each takes about as much."""
_CHUNK = 65_536
SILENT_S = 30.0
"""After how many seconds without a byte a server is named for which requests wait."""


class SilenceWatch:
    """Names a server that sends nothing while requests wait for it: once, until it sends something again."""

    def __init__(self, server: str, if_silent: str) -> None:
        self._server, self._if_silent = server, if_silent
        self._heard_at = 0.0
        self._named = False

    def heard(self) -> None:
        self._heard_at = time.monotonic()
        if self._named:
            self._named = False
            log.warning("%s answers again", self._server)

    def look(self, waiting_since: float) -> float:
        """Name the server if it has been silent for too long. Returns after how many seconds to look again."""
        silent = time.monotonic() - max(waiting_since, self._heard_at)
        if silent < SILENT_S:
            return SILENT_S - silent
        if not self._named:
            self._named = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
            log.warning("%s has sent nothing since %s, and requests wait: %s", self._server, since, self._if_silent)
        return SILENT_S


@functools.cache
def _watch_of(server: str, if_silent: str) -> SilenceWatch:
    """Return the watch that all clients of a server share."""
    return SilenceWatch(server, if_silent)


class HttpFailure(Exception):
    """A request without a complete answer."""

    def __init__(self, message: str, *, sent: bool, timed_out: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        """The server may have received the request, and acted on it."""
        self.timed_out = timed_out


class HttpAnswer(NamedTuple):
    status: int
    body: bytes


class HttpClient:
    """Sends requests to the server at `base_url`, from any thread, over a connection each: one that was kept could be
    closed by the server at the moment it is used, and nobody would know whether it had got the request."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, if_silent: str = "") -> None:
        parts = urlsplit(base_url)
        self._watch = _watch_of(base_url, if_silent) if if_silent else None
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        host = f"[{self._host}]" if ":" in self._host else self._host
        lines = [f"host: {host}:{self._port}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        if any({"\r", "\n"} & set(line) for line in lines):
            raise ValueError("a header can't contain a line break")
        self._headers = "\r\n".join(lines)

    def request(self, method: str, path: str, body: bytes = b"", timeout_s: float = 60.0) -> HttpAnswer:
        """Send a request, and wait for all of its answer. Raises HttpFailure."""
        until = time.monotonic() + timeout_s
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n"
        if method != "GET":
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        with self._connected(until) as connection:
            try:
                connection.settimeout(_left(until))
                connection.sendall(head.encode("latin-1") + b"\r\n" + body)
                return self._receive(connection, until)
            except TimeoutError:
                raise HttpFailure(f"no answer within {timeout_s:g} s", sent=True, timed_out=True) from None
            except (OSError, httptools.HttpParserError, _BadAnswerError) as error:
                raise HttpFailure(_reason(error), sent=True) from None

    def _connected(self, until: float) -> socket.socket:
        try:
            plain = socket.create_connection((self._host, self._port), timeout=_left(until))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return ssl.create_default_context().wrap_socket(plain, server_hostname=self._host) if self._tls else plain
        except TimeoutError:
            raise HttpFailure("the connection could not be made in time", sent=False, timed_out=True) from None
        except OSError as error:
            raise HttpFailure(_reason(error), sent=False) from None

    def _receive(self, connection: socket.socket, until: float) -> HttpAnswer:
        reading, began = _Reading(), time.monotonic()
        while not reading.complete:
            data = self._next(connection, until, began)
            if not data:
                if reading.ends_with_connection:
                    reading.on_message_complete()
                    break
                raise _BadAnswerError("the server closed the connection without an answer")
            reading.parser.feed_data(data)
            if reading.size > MAX_ANSWER_BYTES:
                raise _BadAnswerError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        return HttpAnswer(reading.status, b"".join(reading.body))

    def _next(self, connection: socket.socket, until: float, began: float) -> bytes:
        if self._watch is None:
            connection.settimeout(_left(until))
            return connection.recv(_CHUNK)
        while True:
            connection.settimeout(min(_left(until), self._watch.look(began)))
            with contextlib.suppress(TimeoutError):
                data = connection.recv(_CHUNK)
                self._watch.heard()
                return data


class _BadAnswerError(Exception):
    """An answer that breaks off, or is too large."""


class _Reading:
    """What the parser has seen of an answer."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.body: list[bytes] = []
        self.size = 0
        self.complete = False
        self.ends_with_connection = False
        """The headers are there, and name no length: HTTP/1.0's way, and that of Python's `http.server`."""
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.size += len(name) + len(value)
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.ends_with_connection = not self._has_length

    def on_body(self, body: bytes) -> None:
        self.body.append(body)
        self.size += len(body)

    def on_message_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.complete = self.status >= 200  # 100 Continue and its like only announce the answer
        if not self.complete:
            self.body, self.size = [], 0
            self.ends_with_connection = self._has_length = False


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class AnswerTooLargeError(Exception):
    """A server's answer is larger than allowed, or compressed although that was not asked for."""


_WITHOUT_PROXY = dict.fromkeys(("all://127.0.0.1", "all://localhost", "all://[::1]"))
"""No proxy that the environment names can reach this machine's loopback."""


class BoundedClient(httpx.AsyncClient):
    """As `httpx.AsyncClient`. Reading an answer larger than `max_answer_bytes` raises AnswerTooLargeError."""

    def __init__(
        self, *arguments: Any, max_answer_bytes: int = MAX_ANSWER_BYTES, if_silent: str = "", **options: Any
    ) -> None:
        super().__init__(*arguments, mounts=_WITHOUT_PROXY, **options)
        self._if_silent = if_silent
        self._max_answer_bytes = max_answer_bytes

    async def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send a request. All of httpx's ways to send one come here."""
        request.headers["accept-encoding"] = "identity"
        waiting = _WatchedRequest(request.url, self._if_silent)
        try:
            response = await super().send(request, stream=True, **options)
        except BaseException:
            waiting.end()
            raise
        waiting.heard()
        try:
            if (coding := response.headers.get("content-encoding", "identity")) != "identity":
                raise AnswerTooLargeError(
                    f"{request.url} answered with content-encoding {coding!r}, not as it was asked"
                )
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Bounded(response.stream, self._max_answer_bytes, str(request.url), waiting)
            if not stream:
                await response.aread()
        except BaseException:
            waiting.end()
            await response.aclose()
            raise
        return response


class _WatchedRequest:
    """A request under way. Its server is looked at now and then, until `end`."""

    def __init__(self, url: httpx.URL, if_silent: str) -> None:
        self._watch = _watch_of(f"{url.scheme}://{url.netloc.decode()}", if_silent) if if_silent else None
        self._since = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        if self._watch is not None:
            self._timer = asyncio.get_running_loop().call_later(self._watch.look(self._since), self._look)

    def heard(self) -> None:
        if self._watch is not None:
            self._watch.heard()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, most: int, url: str, waiting: _WatchedRequest) -> None:
        self._stream, self._most, self._url, self._waiting = stream, most, url, waiting

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._stream:
            self._waiting.heard()
            size += len(piece)
            if size > self._most:
                raise AnswerTooLargeError(f"the answer of {self._url} is larger than {self._most >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        self._waiting.end()
        await self._stream.aclose()
