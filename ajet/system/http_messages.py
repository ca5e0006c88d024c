"""The messages between the HTTP server and its handlers, and the keys that requests present."""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from ajet.schema.errors import ModelCallError

encode = msgspec.json.Encoder().encode

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

INTERNAL_ERROR = "internal error of the server: see its log"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The size limits and timeouts of a server."""

    header_deadline_s: float = 10.0
    body_deadline_s: float = 30.0
    max_body_bytes: int = 16 * 1024 * 1024
    """The limit for one body, also after decompression."""
    max_buffered_bytes: int = 64 * 1024 * 1024
    """The limit for all bodies that are being received at the same time."""


@dataclass(slots=True)
class HttpRequest:
    """One request. `headers` have lower-case names; if one is repeated, the first counts."""

    method: str = ""
    path: str = ""
    """As it was sent, percent signs included."""
    query: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    client: tuple[str, int] | None = None
    """The client's host and port."""
    caller: Any = None
    """A value that `admit` passes on to `handle`."""
    unauthenticated: bool = False
    """Set by `admit` if it let the request pass without a key: then its body must be small."""
    max_body: int | None = None
    """Set by `admit`: a limit below the server's."""


@dataclass(slots=True)
class Answer:
    """One response, independent of the server that sends it. As an ASGI application, it sends itself."""

    status: int
    body: bytes | AsyncIterator[bytes]
    headers: dict[str, str] = field(default_factory=dict)
    """Without those that frame the body (content-length, transfer-encoding, connection): the server adds them."""
    close: Callable[[], None] = lambda: None
    """Ends a stream whose reader has gone, whether or not reading had begun. Called on the service loop."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            if not isinstance(self.body, bytes) and scope["http_version"] == "1.0":
                self.body = b"".join([chunk async for chunk in self.body])  # HTTP/1.0 has no chunks
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
            if isinstance(self.body, bytes) and self.status not in (204, 304):
                headers.append((b"content-length", b"%d" % len(self.body)))
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            if isinstance(self.body, bytes):
                await send({"type": "http.response.body", "body": self.body})
                return
            if scope["method"] != "HEAD":
                async for chunk in self.body:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            self.close()


class HttpHandler(Protocol):
    def admit(self, request: HttpRequest) -> Answer | None:
        """Called when the headers have arrived. Return None to go on; an answer refuses the request without reading its
        body."""

    async def handle(self, request: HttpRequest) -> AsgiApp:
        """Answer a complete request, with an `Answer` or an ASGI application. Cancelled if the client goes away; an
        exception is logged and answered by 500."""

    def refuse(self, request: HttpRequest, status: int, code: str, message: str) -> Answer:
        """Format an error as clients of the request's path expect it. The body must be bytes."""


Refuse = Callable[[HttpRequest, int, str, str], Answer]


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, encode(value), {"content-type": "application/json", **(headers or {})})


def server_sent_event(value: Any, name: str = "") -> bytes:
    event = b"data: " + encode(value) + b"\n\n"
    return b"event: " + name.encode() + b"\n" + event if name else event


def event_stream(chunks: AsyncIterator[bytes], close: Callable[[], None]) -> Answer:
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    return Answer(200, chunks, headers, close)


LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The usual names."""

PREFIX = "sk-ajet-"
MAX_KEY_CHARS = 2000
_ID_BYTES, _EXPIRY_BYTES, _SIGNATURE_BYTES = 15, 6, 24
"""120 random bits, and sums divisible by 3: base64 without padding, so each key has exactly one spelling."""
_HEAD_CHARS, _SIGNATURE_CHARS = 28, 32


class InvalidKeyError(ModelCallError):
    """This server has no such key, or it is no longer valid."""

    http_status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class KeyClaim(NamedTuple):
    id: str
    scope: Any
    """The scope passed to `narrow`; None for a full key."""


class KeyRing:
    """Issues and checks the keys of one server."""

    def __init__(self, ttl_s: float, ttl_setting: str) -> None:
        """`ttl_setting`: the configuration key that sets the lifetime, for the message about an expired key."""
        self._secret = secrets.token_bytes(32)
        self._ttl_s = ttl_s
        self._ttl_setting = ttl_setting

    def issue(self) -> tuple[str, str]:
        expiry = int(time.time() + self._ttl_s)
        head = _encode(secrets.token_bytes(_ID_BYTES) + expiry.to_bytes(_EXPIRY_BYTES, "big"))
        return head, PREFIX + head + _sign(self._secret, head)

    def claim(self, key: str) -> KeyClaim:
        """Check a key and return its content. Raises InvalidKeyError."""
        if not key.startswith(PREFIX) or len(key) > MAX_KEY_CHARS or not key.isascii():
            raise InvalidKeyError(f"not a key of this server: pass the api_key that comes with its address ({PREFIX}…)")
        head, dot, rest = key[len(PREFIX) :].partition(".")
        if dot:
            scope, _, signature = rest.rpartition(".")
            expected = _sign(_sign(self._secret, head).encode(), scope)
        else:
            head, signature, scope = head[:_HEAD_CHARS], head[_HEAD_CHARS:], ""
            expected = _sign(self._secret, head)
        if not hmac.compare_digest(signature.encode(), expected.encode()) or len(head) != _HEAD_CHARS:
            raise InvalidKeyError("this key was not issued by this server, or is damaged")
        if int.from_bytes(urlsafe_b64decode(head)[_ID_BYTES:], "big") < time.time():
            raise InvalidKeyError(f"this key has expired ({self._ttl_setting})")
        return KeyClaim(head, _scope(scope) if dot else None)


def narrow(key: str, scope: Any) -> str:
    """Derive a restricted key from a full one; the server reads `scope` from it."""
    body = key.removeprefix(PREFIX)
    head, signature = body[:_HEAD_CHARS], body[_HEAD_CHARS:]
    if len(signature) != _SIGNATURE_CHARS:
        raise ValueError("only a whole key can be narrowed")
    encoded = _encode(json.dumps(scope).encode()).rstrip("=")
    return f"{PREFIX}{head}.{encoded}.{_sign(signature.encode(), encoded)}"


def presented_key(request: HttpRequest) -> str:
    """The key in a request's `Authorization: Bearer` or `x-api-key` header. Raises InvalidKeyError."""
    scheme, _, token = request.headers.get(b"authorization", b"").partition(b" ")
    key = token if scheme.lower() == b"bearer" else request.headers.get(b"x-api-key", b"")
    if not key:
        raise InvalidKeyError(f"no API key: send 'Authorization: Bearer {PREFIX}…' or 'x-api-key: {PREFIX}…'")
    return key.strip().decode("latin-1")


def _scope(encoded: str) -> Any:
    """The scope of a narrowed key. It is untrusted: the holder may have written it."""
    try:
        return json.loads(urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    except (ValueError, RecursionError):
        raise InvalidKeyError("this key's scope can't be read") from None


def _sign(secret: bytes, text: str) -> str:
    return _encode(hmac.digest(secret, text.encode(), "sha256")[:_SIGNATURE_BYTES])


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).decode()


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_port(host: str) -> str:
    """The name or address in a `Host` header."""
    return host[1 : host.index("]")] if host.startswith("[") and "]" in host else host.rsplit(":", 1)[0]


# ---------------------------------------------------------------- JSON of bounded size

MAX_DEPTH = 64
"""Nesting of a JSON body. No chat is deeper, and templates and encoders recurse."""
_NO_BRACKETS = bytes(set(range(256)) - set(b'{}[]"'))


class InvalidBodyError(ValueError):
    """The body is not a JSON object of a bounded size."""


def json_object(body: bytes, most_nodes: int) -> dict[str, Any]:
    """Decode a JSON object, which may hold so many objects and arrays. Raises InvalidBodyError."""
    value = json_value(body, most_nodes)
    if not isinstance(value, dict):
        raise InvalidBodyError(f"the body must be a JSON object, not {kind(value)}")
    return value


def json_value(body: bytes, most_nodes: int) -> Any:
    """Decode JSON, which may hold so many objects and arrays. Raises InvalidBodyError."""
    deep = body.count(b"{") + body.count(b"[") > MAX_DEPTH and _too_deep(body, most_nodes)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBodyError(f"the body is not JSON: {error}") from None
    except RecursionError:
        deep = True
    if deep:
        raise InvalidBodyError(f"the body is nested deeper than {MAX_DEPTH} levels")
    return value


_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def json_members(body: bytes) -> dict[str, bytes] | None:
    """The members of a JSON object, not decoded. None if it isn't one; `json_object` says why."""
    try:
        return {name: bytes(value) for name, value in _members(body).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _too_deep(body: bytes, most_nodes: int) -> bool:
    """Whether JSON is nested too deeply. Looks at the brackets alone, which is faster than decoding it. Raises
    InvalidBodyError if there are too many of them."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = unescaped.translate(None, _NO_BRACKETS).replace(b'""', b"")  # what is left of strings without any
    brackets = b"".join(brackets.split(b'"')[::2])  # those outside of strings
    if brackets.count(b"{") + brackets.count(b"[") > most_nodes:
        raise InvalidBodyError(f"the body holds more than {most_nodes} objects and arrays")
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")  # at least the innermost level
    return bool(brackets)


def kind(value: Any) -> str:
    """A value's type in JSON's terms."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)
