"""Keys: `sk-ajet-…`, random, signed, expiring; each speaks for one episode, or for one agent of it.

An agent's key is made from its episode's key by anyone who holds that, without asking the gateway: the episode key's
signature is the secret that signs the narrower key, and is not part of it. So a key can be narrowed but never widened.

    episode:  sk-ajet- <id, expiry> <signature>
    agent:    sk-ajet- <id, expiry> . <agent, target> . <signature of it under the episode's signature>
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

from ajet.schema.errors import InvalidRequestError, ModelCallError

PREFIX = "sk-ajet-"
_ID_BYTES, _EXPIRY_BYTES, _SIGNATURE_BYTES = 15, 6, 24
"""120 random bits, and sums divisible by 3: base64 without padding, so that no two spellings mean the same key."""
_HEAD_CHARS, _SIGNATURE_CHARS = 28, 32
MAX_KEY_CHARS = 2000


class InvalidKeyError(ModelCallError):
    """Not a key of this gateway, or no longer."""

    http_status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class KeyScopeError(InvalidRequestError):
    """A valid key, but not for this."""

    http_status = 403
    code = "permission_denied"
    error_type = "permission_error"


class KeyClaim(NamedTuple):
    """What a key says."""

    episode: str
    agent: str | None
    target: str | None


class KeyRing:
    """Makes and checks the keys of one gateway."""

    def __init__(self, ttl_s: float) -> None:
        self._secret = secrets.token_bytes(32)
        self._ttl_s = ttl_s

    def new_episode(self) -> tuple[str, str]:
        """A fresh episode's id and key."""
        expiry = int(time.time() + self._ttl_s)
        head = _encode(secrets.token_bytes(_ID_BYTES) + expiry.to_bytes(_EXPIRY_BYTES, "big"))
        return head, PREFIX + head + self._signature(head)

    def claim(self, key: str) -> KeyClaim:
        """What a key entitles to. Raises InvalidKeyError."""
        if not key.startswith(PREFIX) or len(key) > MAX_KEY_CHARS or not key.isascii():
            raise InvalidKeyError("no key of this gateway: it begins with sk-ajet- and comes from the tuner")
        head, dot, rest = key[len(PREFIX) :].partition(".")
        if dot:
            scope, _, signature = rest.rpartition(".")
            expected = _narrow(self._signature(head), scope)
        else:
            head, signature, scope = head[:_HEAD_CHARS], head[_HEAD_CHARS:], ""
            expected = self._signature(head)
        if not hmac.compare_digest(signature.encode(), expected.encode()) or len(head) != _HEAD_CHARS:
            raise InvalidKeyError("this key was not issued by this gateway, or is damaged")
        if int.from_bytes(_decode(head)[_ID_BYTES:], "big") < time.time():
            raise InvalidKeyError("this key has expired (gateway.key_ttl)")
        if not dot:
            return KeyClaim(head, None, None)
        agent, target = json.loads(_decode(scope + "=" * (-len(scope) % 4)))
        return KeyClaim(head, agent, target)

    def _signature(self, head: str) -> str:
        return _sign(self._secret, head)


def agent_key(episode_key: str, agent: str, target: str) -> str:
    """A key that speaks for one agent of the episode alone."""
    body = episode_key.removeprefix(PREFIX)
    head, signature = body[:_HEAD_CHARS], body[_HEAD_CHARS:]
    if len(signature) != _SIGNATURE_CHARS:
        raise ValueError("an agent's key can only be made from an episode's key")
    scope = _encode(json.dumps([agent, target]).encode()).rstrip("=")
    return f"{PREFIX}{head}.{scope}.{_narrow(signature, scope)}"


def _narrow(signature: str, scope: str) -> str:
    return _sign(signature.encode(), scope)


def _sign(secret: bytes, text: str) -> str:
    return _encode(hmac.digest(secret, text.encode(), "sha256")[:_SIGNATURE_BYTES])


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).decode()


def _decode(text: str) -> bytes:
    return urlsafe_b64decode(text)
