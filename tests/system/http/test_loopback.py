"""Which names are this machine's."""

from __future__ import annotations

import pytest

from ajet.system.http.loopback import is_loopback, without_port


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
