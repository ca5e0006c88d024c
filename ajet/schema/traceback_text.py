"""A traceback's text, read for the user: which of its lines is in the user's own code, and what matters of the rest.

The user's own code is every file that belongs neither to Python, nor to an installed package, nor to ajet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_FRAME = re.compile(r'^[\s|+-]*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$')


_MARGIN = re.compile(r"^\s*\|")


"""What the text of an exception group begins its lines with."""


_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3[.\d]*/|^<")


_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


_PACKAGE_NAME = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)")


def user_line(traceback: str) -> str:
    """The innermost line of the user's code: `agent.py:17 in execute`. Empty if there is none."""
    for text in reversed(traceback.splitlines()):
        frame = _FRAME.match(text)
        if frame is not None and _is_the_users(frame["file"]):
            return f"{_shown(frame['file'])}:{frame['line']} in {frame['function']}"
    return ""


def condensed(traceback: str) -> str:
    """The traceback with frames of libraries left out and counted. Unchanged if no frame is the user's."""
    if not user_line(traceback):
        return traceback
    lines: list[str] = []
    skipped: list[str] = []
    skipping = False
    for text in traceback.rstrip().splitlines():
        frame = _FRAME.match(text)
        if frame is not None:
            skipping = not _is_the_users(frame["file"])
            if skipping:
                skipped.append(_owner(frame["file"]))
                continue
        elif skipping and _belongs_to_a_frame(text):
            continue
        skipping = False
        if skipped:
            lines.append(_left_out(skipped))
            skipped = []
        lines.append(text)
    return "\n".join([*lines, *([_left_out(skipped)] if skipped else [])])


def _is_the_users(file: str) -> bool:
    return not _LIBRARY.search(file) and not file.startswith(_PACKAGE)


def _belongs_to_a_frame(text: str) -> bool:
    """Source lines and the marks below them are indented further than a frame's own line."""
    return _MARGIN.sub("", text).startswith("    ")


def _left_out(owners: list[str]) -> str:
    names = ", ".join(dict.fromkeys(owners))
    return f"  … {len(owners)} line{'s' * (len(owners) != 1)} in {names}"


def _owner(file: str) -> str:
    package = _PACKAGE_NAME.search(file)
    if package is not None:
        return package[1]
    return "ajet" if file.startswith(_PACKAGE) else "Python"


def _shown(file: str) -> str:
    """Relative to the working directory, if it is below it."""
    path = Path(file)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


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
