"""`bp("TAG")`: a breakpoint that stops only if its tag is selected (`ajet --debug TAG1,TAG2`).

A paused program must not run into a deadline: while tags are selected, under a debugger, or once `breakpoint()` has
stopped, there are no deadlines and one episode runs at a time (`debugging()`).

`find_breakpoints` reads them off the files, importing none, so that a mistyped tag is refused.
"""

from __future__ import annotations

import ast
import os
import pdb  # noqa: T100 - the debugger is what this module is about
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

ENVIRONMENT = "AJET_DEBUG_TAGS"
"""Tags separated by commas or `|`; `all` selects every breakpoint. An environment variable reaches child processes."""

ALL = "all"
_LOOK_S = 0.2


def set_tags(tags: str) -> None:
    """Select breakpoints, for this process and those it starts."""
    chosen = _split(tags)
    if chosen:
        os.environ[ENVIRONMENT] = ",".join(chosen)
    else:
        os.environ.pop(ENVIRONMENT, None)


def selected_tags() -> frozenset[str]:
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
    if sys.breakpointhook not in (sys.__breakpointhook__, _stop) or os.environ.get("PYTHONBREAKPOINT"):
        breakpoint()  # noqa: T100 - stopping is what this function is for
    else:
        _SharedPrompt().set_trace(sys._getframe(1))


def debugging() -> bool:
    """Whether the program may be paused: tags are selected, a debugger is attached, or `breakpoint()` is expected."""
    return bool(selected_tags()) or _expected.is_set() or _debugger_attached()


def expect_breakpoints() -> None:
    """The user's code calls `breakpoint()`: run one episode at a time, without deadlines."""
    _expected.set()


@contextmanager
def one_prompt() -> Iterator[None]:
    """Within the block, `breakpoint()` stops one episode at a time, even where several run: the others wait until this
    one goes on. An IDE's debugger and `PYTHONBREAKPOINT` stay in charge if they are there."""
    before = sys.breakpointhook
    if before is not sys.__breakpointhook__ or os.environ.get("PYTHONBREAKPOINT") is not None:
        yield
        return

    sys.breakpointhook = _stop
    try:
        yield
    finally:
        sys.breakpointhook = before
        _expected.clear()


def _stop(*_arguments: object, **_options: object) -> None:
    """What `breakpoint()` calls within `one_prompt`."""
    expect_breakpoints()
    _SharedPrompt().set_trace(sys._getframe(1))


_expected = threading.Event()


class _SharedPrompt(pdb.Pdb):
    """A debugger of one thread, which has the terminal from its first prompt until its user says `continue`, or its
    thread ends."""

    _turn = threading.Condition()
    _owner: threading.Thread | None = None

    def __init__(self) -> None:
        super().__init__(nosigint=True)

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        shared = _SharedPrompt
        with shared._turn:
            while shared._owner not in (None, threading.current_thread()) and shared._owner.is_alive():
                shared._turn.wait(_LOOK_S)  # a thread that ends tells nobody
            shared._owner = threading.current_thread()
        super().interaction(frame, traceback)

    def set_continue(self) -> None:
        super().set_continue()
        self._leave()

    def set_quit(self) -> None:
        super().set_quit()
        self._leave()

    def _leave(self) -> None:
        with _SharedPrompt._turn:
            if _SharedPrompt._owner is threading.current_thread():
                _SharedPrompt._owner = None
                _SharedPrompt._turn.notify_all()


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


_FILES = 2000
"""A folder with more files than this is a home directory rather than a project."""
_NO_SOURCES = frozenset({"node_modules", "saved_experiments", "site-packages", "__pycache__"})
_NOT_OURS = frozenset({"pyvenv.cfg", "config.resolved.yaml"})
"""Files that mark a virtual environment, and an experiment's folder with its copies of the sources."""
_WORTH_PARSING = re.compile(r"\b(?:bp|breakpoint|set_trace)\s*\(")
_STOPS = frozenset({"breakpoint", "set_trace"})


@dataclass(slots=True)
class FoundBreakpoints:
    tags: set[str] = field(default_factory=set)
    """The tags of `bp("TAG")`."""
    stops: list[str] = field(default_factory=list)
    """`agent.py:12` for each `breakpoint()` or `pdb.set_trace()`."""
    complete: bool = True
    """Every tag is known: no tag is computed when the program runs, and no file was left out."""


def find_breakpoints(folders: Sequence[Path]) -> FoundBreakpoints:
    """Look through the Python files in these folders and below."""
    found = FoundBreakpoints()
    for number, file in enumerate(_sources(folders)):
        if number >= _FILES:
            found.complete = False
            break
        _look_into(file, found)
    return found


def _sources(folders: Sequence[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        for here, below, names in os.walk(folder):
            if not _NOT_OURS.isdisjoint(names):
                below.clear()
                continue
            below[:] = [name for name in below if not name.startswith(".") and name not in _NO_SOURCES]
            for name in names:
                file = (Path(here) / name).resolve()
                if name.endswith(".py") and file not in seen:
                    seen.add(file)
                    yield file


def _look_into(file: Path, found: FoundBreakpoints) -> None:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text) if _WORTH_PARSING.search(text) else None
    except (OSError, SyntaxError, ValueError):  # importing it will say what is wrong, if the run does
        found.complete = False
        return
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _STOPS:
            found.stops.append(f"{_shown(file)}:{node.lineno}")
        elif name == "bp":
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            tag = given[0] if given else ast.Constant("all")
            if isinstance(tag, ast.Constant) and isinstance(tag.value, str):
                found.tags.add(tag.value)
            else:
                found.complete = False


def _shown(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
