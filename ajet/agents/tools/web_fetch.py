"""`WebFetch`: reads pages of the web from an allow-list, and from nowhere else.

Every address is checked, that of each redirect, too: its host against the list, and what the host leads to, which must
be public unless it is listed itself. The connection goes to the address that was checked. A page's text is shown.
"""

from __future__ import annotations

import asyncio
import codecs
import ipaddress
import posixpath
import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from html import unescape
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import httpcore

from ajet.agents.tools.tool import (
    Arguments,
    StatelessTool,
    ToolContext,
    ToolResult,
    ToolSetupError,
    describe_error,
    shorten,
)

PORTS = {"http": 80, "https": 443}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NetworkRange = ipaddress.IPv4Network | ipaddress.IPv6Network


class Refused(Exception):
    """An address that may not be reached. The message is for the model."""


class AllowList:
    """Entries: `docs.python.org`, `*.example.org`, `example.org:8080`, `https://example.org/docs/`, `10.0.0.0/8`."""

    def __init__(self, entries: Sequence[str]) -> None:
        if not entries:
            raise ToolSetupError(
                "web_fetch reaches nothing unless it is told what: {web_fetch: {allow: [docs.python.org]}}"
            )
        self._entries = list(entries)
        self._networks: list[NetworkRange] = []
        self._places: list[_AllowedPlace] = []
        for entry in entries:
            if not isinstance(entry, str) or not entry.strip():
                raise ToolSetupError(f"web_fetch.allow: {entry!r} is not a host")
            try:
                self._networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                self._places.append(_AllowedPlace(entry))

    def __str__(self) -> str:
        return ", ".join(self._entries)

    def checked_url(self, url: str) -> str:
        """The address without a fragment, if its host is allowed. Raises `Refused`."""
        try:
            parts = urlsplit(url)
            port = parts.port
            host = (parts.hostname or "").rstrip(".").encode("idna").decode("ascii").lower()
            path = _plain_path(parts.path)
            parts.query.encode("ascii")
        except ValueError:
            raise Refused(
                f"{url[:200]!r} is not an address: write it in full, with unusual characters escaped"
            ) from None
        if parts.scheme not in PORTS or not host:
            raise Refused(f"{url[:200]!r} is not a web address: it must begin with https:// or http://")
        if parts.username is not None or parts.password is not None:
            raise Refused("an address with a user name or password is not fetched")
        literal = _literal(host)
        if literal is not None:
            allowed = any(literal in network for network in self._networks)
        else:
            allowed = any(place.holds(parts.scheme, host, port, path) for place in self._places)
        if not allowed:
            raise Refused(f"{host}{path} may not be fetched. Allowed: {self}.")
        shown = f"[{host}]" if ":" in host else host
        netloc = shown if port in (None, PORTS[parts.scheme]) else f"{shown}:{port}"
        return urlunsplit((parts.scheme, netloc, path, parts.query, ""))

    async def addresses(self, host: str, port: int) -> list[str]:
        """What a host leads to. Raises `Refused` if any of it is private and not listed."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Refused(f"{host} was not found: {error}") from None
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        for text in addresses:
            address = _unwrapped(ipaddress.ip_address(text.partition("%")[0]))
            if not _is_public(address) and not any(address in network for network in self._networks):
                raise Refused(f"{host} leads to {address}, which is not a public address, and may not be fetched")
        return addresses


class _AllowedPlace:
    """One entry that names a host."""

    def __init__(self, entry: str) -> None:
        text = entry.strip()
        try:
            parts = urlsplit(text if "://" in text else f"//{text}")
            self.port = parts.port
            name = (parts.hostname or "").rstrip(".")
            self._below = name.startswith("*.")
            self.host = name.removeprefix("*.").encode("idna").decode("ascii").lower()
            self._path = _plain_path(parts.path)
        except ValueError:
            self.host = ""
        if not self.host or "*" in self.host or parts.scheme not in ("", *PORTS) or parts.query or parts.username:
            raise ToolSetupError(
                f"web_fetch.allow: {entry!r} is not a host; write docs.python.org, *.example.org, example.org:8080, "
                "https://example.org/docs/ or an IP address"
            )
        self._scheme = parts.scheme

    def holds(self, scheme: str, host: str, port: int | None, path: str) -> bool:
        """Whether an address lies here."""
        if self._scheme and scheme != self._scheme:
            return False
        if (host.endswith("." + self.host) if self._below else host == self.host) is False:
            return False
        if (port or PORTS[scheme]) != (self.port or PORTS[self._scheme or scheme]):
            return False
        folder = self._path.rstrip("/")
        return path == folder or path.startswith(folder + "/") or not folder


def _plain_path(path: str) -> str:
    """A path without `..`: what a server takes it for decides, and not how it is written."""
    if "\\" in path or any(ord(character) < 33 for character in path):
        raise ValueError(path)
    path.encode("ascii")
    parts = [unquote(part) for part in path.split("/")]
    if any(";" in part and part.partition(";")[0] in (".", "..") for part in parts):
        raise ValueError(path)  # some servers take `..;x` for `..`
    if any(part in (".", "..") or "/" in part for part in parts):
        slash = "/" if path.endswith("/") else ""
        path = posixpath.normpath(unquote(path)) + slash
        path.encode("ascii")
    return "/" + path.lstrip("/")


def _literal(host: str) -> Address | None:
    try:
        return _unwrapped(ipaddress.ip_address(host))
    except ValueError:
        return None


NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
NAT64_LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")


def _unwrapped(address: Address) -> Address:
    """An IPv4 address that is written as an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address) and address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    inner: Any = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    return inner if inner is not None else address


def _is_public(address: Address) -> bool:
    """Whether it is one host's, on the public internet."""
    local = address in NAT64_LOCAL or getattr(address, "is_site_local", False)
    return address.is_global and not address.is_multicast and not local


HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "iframe", "object", "textarea"})
BLOCKS = frozenset(
    {"p", "div", "section", "article", "main", "header", "footer", "nav", "aside", "ul", "ol", "li", "table", "tr"}
    | {"pre", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "br", "hr", "form", "figure", "figcaption", "dl", "dt"}
    | {"dd", "details", "summary", "address", "body"}
)
BEGINNINGS = {**{f"h{level}": "#" * level + " " for level in range(1, 7)}, "li": "- ", "td": " | ", "th": " | "}
TAG_CHARS = 4096
"""How much of a tag is parsed."""
_NAME = re.compile(r"/?([a-zA-Z][a-zA-Z0-9:-]{0,40})")
_HREF = re.compile(r"\shref\s{0,9}=\s{0,9}(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))", re.IGNORECASE)
_ENDS = {name: re.compile(f"</{name}\\b", re.IGNORECASE) for name in HIDDEN | {"title"}}


def page_text(html: str, url: str = "") -> str:
    """The text of a page: its title, then its content, a line for each block."""
    reader = _PageReader(url)
    for piece, is_tag in _pieces(html):
        if is_tag:
            reader.tag(piece)
        else:
            reader.characters(piece)
    return reader.text()


def _pieces(html: str) -> Iterator[tuple[str, bool]]:
    """Texts, and tags without their brackets. What isn't shown is left out; the title is `title=…`, a tag."""
    at = 0
    while (begun := html.find("<", at)) >= 0:
        yield html[at:begun], False
        name = _NAME.match(html, begun + 1)
        if html.startswith("<!--", begun):
            end = html.find("-->", begun + 4)
            at = end + 3
        elif name is None and html[begun + 1 : begun + 2] not in ("!", "?"):
            yield "<", False
            at = begun + 1
            continue
        else:
            end = html.find(">", begun)
            at = end + 1
        if end < 0:  # nothing closes it, nor any later one
            return
        if name is None:
            continue
        word = name[1].lower()
        if word in _ENDS and html[begun + 1] != "/" and html[end - 1] != "/":
            closed = _ENDS[word].search(html, at)
            if word == "title":
                yield "title=" + html[at : closed.start() if closed else at + TAG_CHARS], True
            if closed is None:
                return
            at = closed.start()
        else:
            yield html[begun + 1 : min(end, begun + TAG_CHARS)], True
    yield html[at:], False


class _PageReader:
    def __init__(self, url: str) -> None:
        self._url = url
        self._title = ""
        self._parts: list[str] = []
        self._preformatted = False
        self._link = ""
        self._link_text = False

    def tag(self, text: str) -> None:
        if text.startswith("title="):
            self._title = self._title or " ".join(unescape(text[6:]).split())
            return
        found = _NAME.match(text)
        name = found[1].lower() if found else ""
        ends = text.startswith("/")
        if name in BLOCKS:
            self._parts.append("\n")
        if name == "pre":
            self._preformatted = not ends
        elif name == "a":
            self._anchor(text, ends)
        elif not ends:
            self._parts.append(BEGINNINGS.get(name, ""))

    def _anchor(self, text: str, ends: bool) -> None:
        if self._link and self._link_text:
            self._parts.append(f" ({self._link})")
        found = None if ends else _HREF.search(text)
        target = unescape(next(filter(None, found.groups()), "")) if found else ""
        if target.lower().startswith(("#", "javascript:", "data:")):
            target = ""
        try:
            self._link = urljoin(self._url, target) if target else ""
        except ValueError:  # a page may link to anything
            self._link = target
        self._link_text = False

    def characters(self, text: str) -> None:
        text = unescape(text)
        self._link_text = self._link_text or bool(text.strip())
        self._parts.append(text if self._preformatted else re.sub(r"\s+", " ", text))

    def text(self) -> str:
        lines = [line.rstrip() for line in "".join(self._parts).split("\n")]
        lines = [line if line.startswith("    ") else re.sub(r" {2,}", " ", line).lstrip() for line in lines]
        body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
        return f"{self._title}\n\n{body}".strip()


REDIRECTS = 5
TEXTS = ("text/", "application/json", "application/xml", "application/xhtml", "application/javascript")
ALSO_TEXT = ("+json", "+xml")
CHARSETS = re.compile(
    r"utf-(8(-sig)?|16(-[lb]e)?)|ascii|iso8859-\d+|cp(125\d|866|874|932|949)|koi8-[ru]|gb2312|gbk|gb18030|big5|euc_(jp|kr)|"
    r"shift_jis|iso2022_jp|tis-620|mac-roman"
)
"""Character sets of pages, by Python's names. Others can take any time: `punycode` is quadratic."""
HEADERS = [(b"User-Agent", b"ajet-web-fetch"), (b"Accept", b"text/*, */*;q=0.5"), (b"Accept-Encoding", b"identity")]


class WebFetch(StatelessTool):
    """The tool."""

    limits_itself = True

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
        text = await asyncio.to_thread(_decoded, content, kind)
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
                headers = [(b"Host", urlsplit(url).netloc.encode("ascii")), *HEADERS]
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


def _decoded(content: bytes, kind: str) -> str:
    """The text, by the character set that the server names, if pages are written in it."""
    charset = kind.partition("charset=")[2].split(";")[0].strip("\"' ") or "utf-8"
    try:
        known = codecs.lookup(charset).name
    except (LookupError, ValueError):
        known = ""
    return content.decode(known if CHARSETS.fullmatch(known) else "utf-8", errors="replace")


def _failed(message: str) -> ToolResult:
    return ToolResult(message, success=False)
