"""A terminal for tests: what a person would see of a program, by an emulator over a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyte


class Terminal:
    """Runs one program in a terminal: `with Terminal(["ajet", …]) as terminal:`"""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 40,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            env=environment,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self.raw = b""

    def read(self, timeout_s: float = 0.2) -> bool:
        """Take in what the program has written. False once it has closed the terminal."""
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def wait_for(self, text: str, timeout_s: float = 120.0) -> str:
        """Read until the text is on the screen. Returns the screen."""
        until = time.monotonic() + timeout_s
        while text not in self.text:
            if not self.read() or time.monotonic() > until:
                raise AssertionError(f"{text!r} never came; the terminal shows:\n{self.text}")
        return self.text

    def finish(self, timeout_s: float = 240.0) -> str:
        """Read to the end of the program. Returns everything, also what has scrolled away."""
        until = time.monotonic() + timeout_s
        while self.read():
            if time.monotonic() > until:
                raise AssertionError(f"it did not end; the terminal shows:\n{self.text}")
        self.process.wait(timeout_s)
        return self.everything

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def hang_up(self) -> None:
        """Close the terminal, as somebody does who closes its window."""
        os.close(self._ours)
        self._ours = os.open(os.devnull, os.O_RDONLY)

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    @property
    def everything(self) -> str:
        """The screen, and what has scrolled away above it."""
        above = [
            "".join(row[column].data for column in range(self.screen.columns)).rstrip()
            for row in self.screen.history.top
        ]
        return "\n".join([*above, self.text])

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def _own_terminal() -> None:
    """Ctrl-C that is typed reaches the program, and so does a terminal's end, also where the tests run under nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
