"""What ends a run early from outside, and when it may: Ctrl-C, SIGTERM, and a terminal that is closed.

All of them raise KeyboardInterrupt in the main thread. Only a program's main thread can arrange that; elsewhere nothing
is changed.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)


@contextmanager
def termination_like_interrupt() -> Iterator[None]:
    """SIGTERM, and a terminal that is closed, end a run as cleanly as Ctrl-C."""

    def interrupt(number: int, _frame: Any) -> None:
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
