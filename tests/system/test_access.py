"""Keys: issued, narrowed, checked; never widened."""

from __future__ import annotations

from typing import Any

import pytest

from ajet.system.http_messages import (
    HttpRequest,
    InvalidKeyError,
    KeyRing,
    is_loopback,
    narrow,
    presented_key,
    without_port,
)


def test_a_key_says_its_id_and_its_scope() -> None:
    ring = KeyRing(100, "store.key_ttl")
    identity, key = ring.issue()
    assert ring.claim(key) == (identity, None)
    for scope in (["agent", "target"], {"read": True}, "ä"):
        assert ring.claim(narrow(key, scope)) == (identity, scope)
    assert ring.issue()[1] != key


def test_a_narrowed_key_cannot_be_widened_or_narrowed_again() -> None:
    ring = KeyRing(100, "store.key_ttl")
    _, key = ring.issue()
    mine = narrow(key, "a")
    with pytest.raises(ValueError, match="only a whole key"):
        narrow(mine, "b")
    head, scope, signature = mine.split(".")
    for forged in (head + signature, f"{head}.{narrow(key, 'b').split('.')[1]}.{signature}", f"{head}.{scope}.", head):
        with pytest.raises(InvalidKeyError, match="not issued by this server"):
            ring.claim(forged)


def test_keys_of_others_and_expired_ones_are_refused() -> None:
    _, foreign = KeyRing(100, "").issue()
    with pytest.raises(InvalidKeyError, match="not issued by this server"):
        KeyRing(100, "").claim(foreign)
    expired = KeyRing(-1, "store.key_ttl")
    with pytest.raises(InvalidKeyError, match=r"expired \(store\.key_ttl\)"):
        expired.claim(expired.issue()[1])
    with pytest.raises(InvalidKeyError, match="pass the api_key that comes with its address"):
        expired.claim("dummy")
    for nonsense in ("", "sk-ajet-", "sk-other", "sk-ajet-é", "sk-ajet-" + "x" * 5000):
        with pytest.raises(InvalidKeyError):
            expired.claim(nonsense)


@pytest.mark.parametrize(
    "headers", [{b"authorization": b"Bearer k"}, {b"authorization": b"bearer  k "}, {b"x-api-key": b"k"}]
)
def test_a_request_presents_its_key_in_either_header(headers: Any) -> None:
    assert presented_key(HttpRequest(headers=headers)) == "k"


@pytest.mark.parametrize("headers", [{}, {b"authorization": b"Basic k"}, {b"x-api-key": b""}])
def test_a_request_without_a_key_says_how_to_send_one(headers: Any) -> None:
    with pytest.raises(InvalidKeyError, match="Authorization: Bearer sk-ajet-"):
        presented_key(HttpRequest(headers=headers))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "LocalHost"])
def test_here(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example", "127.1"])
def test_elsewhere(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("header", "name"),
    [("a:1", "a"), ("a", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("[::1", "[:"), ("", "")],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert without_port(header) == name
