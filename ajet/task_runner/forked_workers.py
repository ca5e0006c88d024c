"""`ForkedWorkers`: the worker processes of one `ajet runner`, forked from it.

The runner has imported the libraries and the user's code, so a worker is ready in milliseconds. It runs no user code
itself but that import. What an ended worker leaves running is killed with it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ajet.system.forking import kill_all, reseed

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Ended(NamedTuple):
    """A worker that has ended."""

    number: int
    code: int
    """Its exit code; negative: the signal that killed it."""


class ForkedWorkers:
    """`body` is what a worker does: it gets the worker's number and the runner's process id, and returns the exit
    code."""

    def __init__(self, body: Callable[[int, int], int]) -> None:
        self._body = body
        self._numbers: dict[int, int] = {}
        """Process id → number."""
        self._stopped = False

    def __len__(self) -> int:
        return len(self._numbers)

    def start(self, number: int) -> None:
        """Fork a worker, unless `stop` was called."""
        sys.stdout.flush()
        sys.stderr.flush()
        runner = os.getpid()
        # a signal that came between the fork and the worker's own handlers would run the runner's handlers there
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            if self._stopped:
                return
            process = os.fork()
            if process == 0:
                self._become_worker(number, runner)
            self._numbers[process] = number
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        """Ask all workers to finish what they have begun. No other one starts."""
        self._stopped = True
        for process in list(self._numbers):
            os.kill(process, signal.SIGTERM)

    def wait(self) -> Ended:
        """Wait until a worker ends."""
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert found is not None
            number = self._numbers.get(found.si_pid)
            if number is not None:
                kill_all(found.si_pid)  # before it is reaped: until then, its process id isn't reused
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                _, status = os.waitpid(found.si_pid, 0)
                self._numbers.pop(found.si_pid, None)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if number is not None:
                return Ended(number, os.waitstatus_to_exitcode(status))

    def _become_worker(self, number: int, runner: int) -> NoReturn:
        code = 1
        try:
            os.setsid()  # Ctrl-C on the terminal reaches the runner alone, and all that a worker starts can be killed
            for stopping in STOPPING:
                signal.signal(stopping, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            reseed()
            code = self._body(number, runner)
        except BaseException:  # noqa: BLE001 - a worker must never return to the runner's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
