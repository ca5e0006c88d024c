"""`ChildProcess`: a program of ours in a process of its own, which answers each question with one line.

It ends when its standard input does, so also when its owner is killed. Ctrl-C is not for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import time
from pathlib import Path

PIPE_BYTES = 1 << 20
"""Most questions fit into the pipe at once, so that asking is not interrupted again and again."""
LESS_URGENT = 5
"""Its owner's service loop goes first where there are too few cores."""


class ChildProcess:
    """For one thread at a time, and never a service loop's: asking waits for the answer."""

    def __init__(self, program: Path) -> None:
        # -P: our folders' modules mustn't hide the standard library's
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        with contextlib.suppress(OSError):  # it has ended already, which `ask` will notice
            os.setpriority(os.PRIO_PROCESS, self._child.pid, os.getpriority(os.PRIO_PROCESS, 0) + LESS_URGENT)
        assert self._child.stdin is not None and self._child.stdout is not None
        self._questions, self._answers = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._questions, False)
        with contextlib.suppress(OSError):  # the user's share of large pipes is taken
            fcntl.fcntl(self._questions, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, question: bytes, within_s: float) -> bytes:
        """The line with which it answers. Raises TimeoutError, or ConnectionError if it ended: in both cases, and
        whatever else is raised, `end` it."""
        until = time.monotonic() + within_s
        rest = memoryview(question)
        while rest:
            _wait(self._questions, select.POLLOUT, until)
            try:
                rest = rest[os.write(self._questions, rest) :]
            except OSError as error:
                raise ConnectionError(str(error)) from error
        answer = b""
        while not answer.endswith(b"\n"):
            _wait(self._answers, select.POLLIN, until)
            piece = os.read(self._answers, 65_536)
            if not piece:
                raise ConnectionError("it ended")
            answer += piece
        return answer

    def kill(self) -> None:
        """From any thread: whoever asks it gets a ConnectionError."""
        self._child.kill()

    def end(self) -> None:
        """Kill it, and leave nothing of it."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it didn't read any more
                    pipe.close()


def _wait(pipe: int, event: int, until: float) -> None:
    """Wait for a pipe. Raises TimeoutError."""
    poll = select.poll()  # `select` takes no file numbers above 1023, which a server with many connections has
    poll.register(pipe, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError
