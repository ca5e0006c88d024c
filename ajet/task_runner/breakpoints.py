"""`bp("TAG")`: a breakpoint that stops only when its tag was asked for (`ajet --debug TAG1,TAG2`).

Someone who looks at a paused program must not be timed out: while tags are selected, or under a debugger, deadlines are
off and one episode runs at a time (`debugging()`).
"""

from __future__ import annotations

import os
import pdb  # noqa: T100 - the debugger is what this module is about
import sys
from collections.abc import Iterable

ENVIRONMENT = "AJET_DEBUG_TAGS"
"""Tags separated by commas or `|`; `all` selects every breakpoint. Read when asked, so child processes follow."""

ALL = "all"


def set_tags(tags: str | Iterable[str]) -> None:
    """Select these breakpoints, for this process and those it starts."""
    chosen = _split(tags) if isinstance(tags, str) else [str(tag) for tag in tags]
    if chosen:
        os.environ[ENVIRONMENT] = ",".join(chosen)
    else:
        os.environ.pop(ENVIRONMENT, None)


def selected_tags() -> frozenset[str]:
    """The tags asked for."""
    return frozenset(_split(os.environ.get(ENVIRONMENT, "")))


def bp(tag: str = ALL) -> None:
    """Stop in the debugger at the caller's line, if `tag` is selected. Costs a dictionary look-up otherwise.

    The debugger is that of `breakpoint()`: an IDE's, or `PYTHONBREAKPOINT`'s; else pdb on this terminal.
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
    """Whether someone may be looking at a paused program: tags are selected, or a debugger is attached."""
    return bool(selected_tags()) or _debugger_attached()


def _debugger_attached() -> bool:
    debugpy = sys.modules.get("debugpy")
    if debugpy is not None and debugpy.is_client_connected():
        return True
    trace = sys.gettrace()
    if trace is not None and not _module_of(trace).startswith("coverage"):
        return True
    monitoring = getattr(sys, "monitoring", None)  # CPython 3.12: debuggers need no trace function any more
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None


def _module_of(trace: object) -> str:
    owner = getattr(trace, "__self__", trace)
    return str(getattr(owner, "__module__", "") or type(owner).__module__)


def _split(tags: str) -> list[str]:
    return [tag for tag in (part.strip() for part in tags.replace("|", ",").split(",")) if tag]
