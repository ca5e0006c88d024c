"""`WebFetch`: reads pages of the web from an allow-list, and from nowhere else.

Every address is checked, that of each redirect, too: its host against the list, and what the host leads to, which must
be public unless it is listed itself. The connection goes to the address that was checked. A page's text is shown.
"""

from __future__ import annotations

import asyncio
import codecs
import ssl
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from ajet.agents.tools.page_text import page_text
from ajet.agents.tools.text import describe_error, shorten
from ajet.agents.tools.tool import Arguments, StatelessTool, ToolContext, ToolResult
from ajet.agents.tools.web_allow import AllowList, Refused

REDIRECTS = 5
TEXTS = ("text/", "application/json", "application/xml", "application/xhtml", "application/javascript")
ALSO_TEXT = ("+json", "+xml")
HEADERS = [(b"User-Agent", b"ajet-web-fetch"), (b"Accept", b"text/*, */*;q=0.5"), (b"Accept-Encoding", b"identity")]


class WebFetch(StatelessTool):
    """The tool."""

    def __init__(
        self,
        *,
        allow: list[str] | None = None,
        name: str = "web_fetch",
        timeout: float = 20.0,
        max_bytes: int = 2_000_000,
        output_chars: int = 16_000,
    ) -> None:
        """`allow`: hosts (`docs.python.org`, `*.example.org`), beginnings of addresses (`https://example.org/a/`), IP
        addresses or networks. `timeout`: of a call, all redirects together. `max_bytes`: what is read of a page."""
        self._allow = AllowList(allow or [])
        self._timeout, self._max_bytes, self._output_chars = timeout, max_bytes, output_chars
        self.name = name
        self.description = (
            f"Fetch a web page and see its text. Only these can be reached: {self._allow}. Long pages come in parts: "
            "ask again with `start`."
        )
        self.parameters = {
            "type": "object",
            "properties": {
                "url": {"type": "string", "description": "The address, with https:// or http://"},
                "start": {"type": "integer", "minimum": 0, "description": "Of the text, the first character to show"},
            },
            "required": ["url"],
            "additionalProperties": False,
        }

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        url = str(arguments["url"]).strip()
        try:
            async with asyncio.timeout(self._timeout):
                url, status, kind, content, cut = await self._get(url)
        except TimeoutError:
            return _failed(f"{url} did not answer within {self._timeout:g} s.")
        except Refused as error:
            return _failed(str(error))
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
            return _failed(f"{url} could not be reached: {describe_error(error)}")
        if not kind.startswith(TEXTS) and not kind.partition(";")[0].endswith(ALSO_TEXT):
            return _failed(f"{url} is {kind or 'of no type'}, {len(content):,} bytes: only text can be shown.")
        text = _decoded(content, kind)
        if "html" in kind:
            text = await asyncio.to_thread(page_text, text, url)
        if status >= 400:
            return _failed(f"{url} answered with status {status}.\n{shorten(text, 1000)}")
        return self._shown(url, text, int(arguments.get("start", 0)), cut)

    def _shown(self, url: str, text: str, start: int, cut: bool) -> ToolResult:
        part = text[start : start + self._output_chars]
        notes = []
        if start and not part:
            return _failed(f"{url} has {len(text):,} characters: `start` is beyond its end.")
        if start or len(part) < len(text):
            notes.append(f"[characters {start:,} to {start + len(part):,} of {len(text):,}]")
        if start + len(part) < len(text):
            notes.append(f"[to go on: start={start + len(part)}]")
        elif cut:
            notes.append(f"[the page is longer: only its first {self._max_bytes:,} bytes were read]")
        data = {"url": url, "characters": len(text), "complete": not notes}
        return ToolResult("\n".join(filter(None, (part or "(The page has no text.)", *notes))), data=data)

    async def _get(self, url: str) -> tuple[str, int, str, bytes, bool]:
        """The final address, its status, type and content, and whether that was cut."""
        backend = _Guarded(self._allow)
        context = await asyncio.to_thread(ssl.create_default_context)
        async with httpcore.AsyncConnectionPool(ssl_context=context, network_backend=backend) as pool:
            for _ in range(REDIRECTS + 1):
                url = self._allow.checked_url(url)
                headers = [(b"Host", _authority(url)), *HEADERS]
                async with pool.stream("GET", url.encode("ascii"), headers=headers) as response:
                    found = {name.lower(): value.decode("latin-1") for name, value in response.headers}
                    target = found.get(b"location")
                    if response.status in (301, 302, 303, 307, 308) and target:
                        url = urljoin(url, target)
                        continue
                    if found.get(b"content-encoding", "identity") != "identity":
                        raise Refused(f"{url} is compressed, which was not asked for, and can't be shown.")
                    content = bytearray()
                    async for chunk in response.aiter_stream():
                        content += chunk
                        if len(content) > self._max_bytes:
                            break
                    cut = len(content) > self._max_bytes
                    kind = found.get(b"content-type", "text/plain").lower()
                    return url, response.status, kind, bytes(content[: self._max_bytes]), cut
        raise Refused(f"more than {REDIRECTS} redirects; the last led to {url[:500]}")


class _Guarded(httpcore.AsyncNetworkBackend):
    """Connects to addresses that the list allows."""

    def __init__(self, allow: AllowList) -> None:
        self._allow = allow
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception | None = None
        for address in await self._allow.addresses(host, port):
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.ConnectError as error:
                failure = error
        raise failure or httpcore.ConnectError("no address")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _authority(url: str) -> bytes:
    return urlsplit(url).netloc.encode("ascii")


def _decoded(content: bytes, kind: str) -> str:
    """The text, by the character set that the server names."""
    charset = kind.partition("charset=")[2].split(";")[0].strip("\"' ") or "utf-8"
    try:
        codecs.lookup(charset)
        return content.decode(charset, errors="replace")
    except (LookupError, ValueError):  # an unknown one, or one that is none of text
        return content.decode("utf-8", errors="replace")


def _failed(message: str) -> ToolResult:
    return ToolResult(message, success=False)
