"""`HttpBridge`: from a worker process to the gateway of this machine, for what needs nothing of a client library.

HTTP/1.1 as our own gateway speaks it, and no more: a request and its whole answer at a time, over connections that stay
open. In a process that was forked a moment ago, a client library's way to the same bytes costs several times as much as
the rest of the episode. Works from any event loop. Cancelling the caller closes its connection, which cancels the call.
"""

from __future__ import annotations

import asyncio
import ipaddress
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from ajet.system.http_messages import Answer

MOST_HEAD_BYTES = 64 * 1024

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpBridge:
    """Connects one agent to its episode's session at the gateway."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """`base_url`: one that `can_reach`."""
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname, parts.port
        self._head = f"host: {parts.netloc}\r\nauthorization: Bearer {api_key}\r\ncontent-type: application/json\r\n"
        self._idle: WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Connection]] = WeakKeyDictionary()

    @staticmethod
    def can_reach(base_url: str) -> bool:
        """Whether it is plain HTTP on this machine, by an address that no resolver has to be asked for."""
        parts = urlsplit(base_url)
        try:
            here = ipaddress.ip_address(parts.hostname or "").is_loopback
        except ValueError:
            return False
        return here and parts.scheme == "http" and parts.path == "/v1"

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        """Raises OSError if there is no answer, or none that our gateway would give."""
        request = f"{method} {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode() + body
        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        while idle:
            answer = await self._exchange(idle.pop(), request, idle, reused=True)
            if answer is not None:
                return answer
        connection = await asyncio.open_connection(self._host, self._port, limit=MOST_HEAD_BYTES)
        answer = await self._exchange(connection, request, idle, reused=False)
        assert answer is not None
        return answer

    async def _exchange(
        self, connection: _Connection, request: bytes, idle: list[_Connection], *, reused: bool
    ) -> Answer | None:
        """None if a reused connection turns out to have been closed while it was idle."""
        reader, writer = connection
        keep = begun = False
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            begun = True
            status, headers = _read_head(head)
            body = await reader.readexactly(int(headers["content-length"]))
            keep = headers.get("connection", "").lower() != "close"
            return Answer(status, body, headers)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if reused and not begun and not getattr(error, "partial", b""):
                return None
            raise ConnectionError("the gateway closed the connection before its answer was complete") from error
        except (asyncio.LimitOverrunError, LookupError, ValueError) as error:
            raise ConnectionError(f"the gateway's answer is not readable: {error}") from error
        finally:
            if keep:
                idle.append(connection)
            else:
                writer.close()


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """The status and the headers, by their lower-case names."""
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    pairs = (line.partition(":") for line in lines)
    return int(first.split(" ", 2)[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}
