"""`bp("TAG")`: a breakpoint that stops only if its tag is selected (`ajet --debug TAG1,TAG2`).

A paused program must not run into a deadline: while tags are selected, or under a debugger, there are no deadlines and
one episode runs at a time (`debugging()`).
"""

from __future__ import annotations

import os
import pdb  # noqa: T100 - the debugger is what this module is about
import sys
from collections.abc import Iterable

ENVIRONMENT = "AJET_DEBUG_TAGS"
"""Tags separated by commas or `|`; `all` selects every breakpoint. An environment variable reaches child processes."""

ALL = "all"


def set_tags(tags: str | Iterable[str]) -> None:
    """Select breakpoints, for this process and those it starts."""
    chosen = _split(tags) if isinstance(tags, str) else [str(tag) for tag in tags]
    if chosen:
        os.environ[ENVIRONMENT] = ",".join(chosen)
    else:
        os.environ.pop(ENVIRONMENT, None)


def selected_tags() -> frozenset[str]:
    """The selected tags."""
    return frozenset(_split(os.environ.get(ENVIRONMENT, "")))


def bp(tag: str = ALL) -> None:
    """Stop in the debugger at the caller's line if `tag` is selected. Otherwise costs one dictionary look-up.

    Uses the debugger of `breakpoint()` (an IDE's, or `PYTHONBREAKPOINT`), or else pdb on this terminal.
    """
    if ENVIRONMENT not in os.environ:
        return
    tags = selected_tags()
    if tag not in tags and ALL not in tags:
        return
    if sys.breakpointhook is not sys.__breakpointhook__ or os.environ.get("PYTHONBREAKPOINT"):
        breakpoint()  # noqa: T100 - stopping is what this function is for
    else:
        pdb.Pdb(nosigint=True).set_trace(sys._getframe(1))


def debugging() -> bool:
    """Whether the program may be paused: tags are selected, or a debugger is attached."""
    return bool(selected_tags()) or _debugger_attached()


def _debugger_attached() -> bool:
    debugpy = sys.modules.get("debugpy")
    if debugpy is not None and debugpy.is_client_connected():
        return True
    trace = sys.gettrace()
    if trace is not None and not _module_of(trace).startswith("coverage"):
        return True
    monitoring = getattr(sys, "monitoring", None)  # since CPython 3.12, debuggers don't need a trace function
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None


def _module_of(trace: object) -> str:
    owner = getattr(trace, "__self__", trace)
    return str(getattr(owner, "__module__", "") or type(owner).__module__)


def _split(tags: str) -> list[str]:
    return [tag for tag in (part.strip() for part in tags.replace("|", ",").split(",")) if tag]
