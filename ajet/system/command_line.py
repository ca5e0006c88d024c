"""What all commands share: how their arguments are read, how they say that something went wrong, and what ends them
early (`termination_like_interrupt`, `interrupted_when_whole`): Ctrl-C, SIGTERM, and a terminal that is closed.

| exit code | what |
|---|---|
| 0 | done |
| 1 | tried, and failed: a run, every episode, a check |
| 2 | something you can fix: arguments, config, data, workflow file, missing package |
| 130 | interrupted, by Ctrl-C, SIGTERM or a closed terminal |
| 141 | nobody reads the output any more (`ajet … | head`), as of programs that SIGPIPE ends |

An error is printed to stderr. With `--json` it is also the last line on stdout, as
`{"event": "error", "error": "…", "exit_code": 2}`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import resource
import shutil
import signal
import stat
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ajet.schema.errors import EXIT_USER_ERROR, UserError
from ajet.schema.printable import printable

log = logging.getLogger(__name__)

JSON_FLAG = "--json"
OPEN_FILES = 4096
"""How many files and connections a command asks to have open at once: each concurrent episode may hold a few, and many
systems begin with 256 or 1,024."""
_on_stdout = False


class ArgumentError(UserError):
    """A command line that makes no sense."""


class CommandParser(ArgumentParser):
    """Reads the arguments of a command. What is wrong with them is an error like any other."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}\n    see: {self.prog} --help")


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """The type of an argument that is a whole number."""

    def read(text: str) -> int:
        with suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        raise ArgumentTypeError(f"{text!r}: write a whole number{_range(text, least, most)}")

    return read


def real(least: float, most: float, unit: str = "") -> Callable[[str], float]:
    """The type of an argument that is a number. `unit`: what it counts."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if least <= float(text) <= most:
                return float(text)
        raise ArgumentTypeError(f"{text!r}: write a number{unit and f' of {unit}'}{_range(text, least, most)}")

    return read


GUARD, TINY = 1e6, 1e-3
"""An upper bound as high as this only keeps nonsense out, and is named only to those who go beyond it; a lower one
below this keeps 0 out."""


def _range(text: str, least: float, most: float) -> str:
    with suppress(ValueError):
        if most < GUARD or float(text) > most:
            return f" from {least:,g} to {most:,.0f}"
    return " above 0" if 0 < least < TINY else f", at least {least:,g}"


def open_more_files() -> int:
    """Ask for `OPEN_FILES`, as far as the system's hard limit lets us. Returns how many may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return OPEN_FILES
    possible = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return possible


def show_errors_as_asked(arguments: Sequence[str]) -> None:
    """From now on, errors are printed to stdout too if the command line asks for JSON."""
    global _on_stdout
    _on_stdout = JSON_FLAG in arguments


def fail(message: str, code: int = EXIT_USER_ERROR) -> int:
    """Print an error. Returns `code`."""
    message = printable(message)
    if _on_stdout:
        print(json.dumps({"event": "error", "error": message, "exit_code": code}), flush=True)
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\033[1;31merror:\033[0m {message}" if colour else f"error: {message}", file=sys.stderr)
    return code


ADVICE = {
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "choose a place that you may use, or change its permissions",
    errno.EPERM: "choose a place that you may use, or change its permissions",
    errno.ENOSPC: "make room, or choose a place on another disk",
    errno.EDQUOT: "make room, or choose a place on another disk",
    errno.EMFILE: "let fewer episodes run at once (rollout.max_env_worker), or raise the limit (`ulimit -n`)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "one of these folders is a file: choose another place",
    errno.EISDIR: "this is a folder: name a file",
    errno.ELOOP: "its links lead in a circle: choose another place",
}
"""What the user can do about an operating system's refusal."""
NO_HOME = "Could not determine home directory."
"""What `Path.home` and `Path.expanduser` raise, where the user isn't known to the system or `~name` names nobody."""


def place_advice(error: BaseException, else_in: Path | None = None) -> str | None:
    """The message, or None if the error is none of these. `else_in`: where a disk was full, if the error doesn't
    say."""
    if isinstance(error, RuntimeError) and str(error) == NO_HOME:
        return "there is no home folder for a path that begins with ~\n    set HOME, or write the path in full"
    if isinstance(error, shutil.Error):
        error = _first_of(error)
    if not isinstance(error, OSError) or error.errno not in ADVICE:
        return None
    found = error.filename
    if found is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = else_in or "a disk is full"
    if found is None and error.errno == errno.EMFILE:
        found = "this process"
    if found is None:
        return None
    place = os.fsdecode(found) if isinstance(found, str | bytes) else str(found)
    shown = place if len(place) <= 200 else f"{place[:100]}…{place[-60:]}"
    return f"{shown}: {error.strerror}\n    {ADVICE[error.errno]}"


def _first_of(error: shutil.Error) -> OSError:
    """What was wrong with the first file of a folder that could not be copied: it is known only as text."""
    _, target, text = error.args[0][0]
    code = re.match(r"\[Errno (\d+)\]", str(text))
    return OSError(int(code[1]), os.strerror(int(code[1])), target) if code else error


# ---------------------------------------------------------------- interruptions: KeyboardInterrupt in the main thread


@contextmanager
def termination_like_interrupt() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed, end a run as cleanly as Ctrl-C. A process that user code forks, such as a
    worker of multiprocessing's Pool, inherits that, and ends as if it did not."""
    run = os.getpid()

    def interrupt(number: int, _frame: Any) -> None:
        if os.getpid() != run:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if number == signal.SIGHUP:  # the system and the shell may both send it
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            _leave_terminal()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup: the run outlives its terminal
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, *[signal.SIGHUP] * (not ignored))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_recognised() -> Iterator[None]:
    """An interrupt that comes during an import may arrive as another error: Python 3.11 makes a RuntimeError of what
    ends a `__set_name__`, and transformers a ModuleNotFoundError of that."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__
        if cause is not None:
            raise KeyboardInterrupt from error
        raise


def _leave_terminal() -> None:
    """What would be written to a terminal goes nowhere: the terminal is gone, and writing to it fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def interrupted_when_whole(whole: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """While something isn't whole, a KeyboardInterrupt waits until the function that is given is called. A second one
    doesn't."""
    held: list[KeyboardInterrupt] = []
    before: dict[int, Callable[[int, Any], Any]] = {}

    def hold(number: int, frame: Any) -> None:
        try:
            before[number](number, frame)
        except KeyboardInterrupt as interrupt:
            if held or whole():
                raise
            held.append(interrupt)
            log.warning("interrupted: the present step is completed and saved first; again: leave without it")

    def end_if_held() -> None:
        if held:
            raise held[0]

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(handler := signal.getsignal(number)):
                before[number] = handler
                signal.signal(number, hold)
    try:
        yield end_if_held
    finally:
        for taken, handler in before.items():
            if signal.getsignal(taken) is hold:
                signal.signal(taken, handler)
