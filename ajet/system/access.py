"""Keys: `sk-ajet-…`, random, signed, expiring. Each stands for one id, or for a narrower scope of it.

Whoever holds a key can narrow it without asking the server: the key's signature is the secret that signs the narrower
key, and is not part of it. So a key can be narrowed but never widened.

    whole:     sk-ajet- <id, expiry> <signature>
    narrowed:  sk-ajet- <id, expiry> . <scope as JSON> . <its signature under the whole key's signature>
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, NamedTuple

from ajet.schema.errors import ModelCallError
from ajet.system.http_messages import HttpRequest

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The usual names."""

PREFIX = "sk-ajet-"
MAX_KEY_CHARS = 2000
_ID_BYTES, _EXPIRY_BYTES, _SIGNATURE_BYTES = 15, 6, 24
"""120 random bits, and sums divisible by 3: base64 without padding, so each key has exactly one spelling."""
_HEAD_CHARS, _SIGNATURE_CHARS = 28, 32


class InvalidKeyError(ModelCallError):
    """Not a key of this server, or no longer valid."""

    http_status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class KeyClaim(NamedTuple):
    """What a key says."""

    id: str
    scope: Any
    """What `narrow` was given; None for a whole key."""


class KeyRing:
    """Issues and checks the keys of one server."""

    def __init__(self, ttl_s: float, ttl_setting: str) -> None:
        """`ttl_setting`: the configuration key that sets the lifetime, for the message about an expired key."""
        self._secret = secrets.token_bytes(32)
        self._ttl_s = ttl_s
        self._ttl_setting = ttl_setting

    def issue(self) -> tuple[str, str]:
        """A fresh id and its key."""
        expiry = int(time.time() + self._ttl_s)
        head = _encode(secrets.token_bytes(_ID_BYTES) + expiry.to_bytes(_EXPIRY_BYTES, "big"))
        return head, PREFIX + head + _sign(self._secret, head)

    def claim(self, key: str) -> KeyClaim:
        """What a key entitles its holder to. Raises InvalidKeyError."""
        if not key.startswith(PREFIX) or len(key) > MAX_KEY_CHARS or not key.isascii():
            raise InvalidKeyError(f"not a key of this server: its keys begin with {PREFIX}")
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
    """A key for part of what a whole key stands for; the server reads `scope` from it."""
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
    """What a key was narrowed to. Its holder may have written it by hand."""
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
