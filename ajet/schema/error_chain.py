"""What an exception says beside its own message: its causes, and the address that a client could not reach."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit


def address_of(error: BaseException) -> str:
    """Which address a client could not reach or got an error from: many clients' messages don't say. Empty if there is
    none. Without user name, password and query, which may be secret."""
    for link in error_chain(error):
        try:
            url = str(link.request.url)  # type: ignore[attr-defined] # of httpx, and of clients built on it or on requests
        except (AttributeError, RuntimeError):  # httpx raises the latter if it has no request
            continue
        parts = urlsplit(url)
        if parts.hostname:
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return ""


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and the members of exception groups."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
