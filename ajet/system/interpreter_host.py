"""`InterpreterHost`: runs one of our programs in another Python interpreter, whose packages would clash with those
here.

It answers requests, one JSON object per line: requests go to its standard input, answers come on a pipe of their own
(its first argument). Several requests may be in flight. Its output is passed on, and the last lines are kept for error
messages.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Self

from ajet.schema.errors import AjetError, ConfigError

START_S = 180.0
"""How long the program may take to import its packages and be ready."""
KEPT_LINES = 20
"""How many lines of the process's output are kept for error messages."""


class InterpreterHost:
    """One process. Any thread may ask it."""

    package: ClassVar[str]
    """The package that the other interpreter provides, for messages."""
    fault: ClassVar[type[AjetError]]
    """Raised for a request that the program answers with an error."""
    gone: ClassVar[type[AjetError]]
    """Raised for requests to a process that has ended."""

    def __init__(self, program: Path, arguments: Sequence[str], interpreter: str, key: str) -> None:
        """`key`: the YAML key that names the interpreter, for errors."""
        self.interpreter = interpreter
        self._ready: Future[Any] = Future()
        self._answers = {"ready": self._ready}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ended = False
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        reading, writing = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            self._process = subprocess.Popen(
                [interpreter, str(program), str(writing), *arguments],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
                text=True,
                errors="replace",
                env=environment,
            )
        except OSError as error:
            os.close(reading)
            raise ConfigError(f"{key}: {interpreter} can't be run: {error.strerror}") from None
        finally:
            os.close(writing)
        threading.Thread(target=self._read, args=(reading,), name=f"{self.package}-answers", daemon=True).start()
        threading.Thread(target=self._listen, name=f"{self.package}-log", daemon=True).start()

    @classmethod
    def shared(cls, *given: Any) -> Self:
        """The one that everybody in this process shares, once it is ready. It ends with this process."""
        key = cls, json.dumps(given)
        with _sharing:
            host = _shared.get(key)
            if not isinstance(host, cls) or not host.alive:
                host = _shared[key] = cls(*given)
                atexit.register(host.close)
        host.ready()
        return host

    def ready(self) -> None:
        """Wait until it can be asked. Raises ConfigError."""
        raise NotImplementedError

    def started(self) -> Any:
        """Wait until the program is ready, and return its first answer. Raises `fault`, or TimeoutError."""
        return self._ready.result(START_S)

    @property
    def alive(self) -> bool:
        """Whether it takes requests. A process that is about to exit closes its answers first."""
        return not self._ended and self._process.poll() is None

    def ask(self, do: str, **fields: Any) -> tuple[str, Future[Any]]:
        """Send a request. Returns its number, by which it can be cancelled, and the future answer."""
        number = str(next(self._numbers))
        answer: Future[Any] = Future()
        self._answers[number] = answer
        if not self._send({"do": do, "id": number, **fields}) or self._ended:
            self._fail()
        return number, answer

    def cancel(self, number: str) -> None:
        self._send({"do": "cancel", "of": number})

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, request: dict[str, Any]) -> bool:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8") as answers:
            for line in answers:
                answer = json.loads(line)
                future = self._answers.pop(answer["id"], None)
                if future is None or not future.set_running_or_notify_cancel():
                    continue
                if "error" in answer:
                    future.set_exception(self.fault(f"{self.package}: {answer['error']}"))
                else:
                    future.set_result(answer.get("value"))
        self._ended = True
        self._fail()

    def _fail(self) -> None:
        error = self.gone(f"the process of {self.package} has ended: {self._last_lines()}")
        for number in list(self._answers):
            future = self._answers.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.rstrip())
            with contextlib.suppress(OSError, ValueError):  # a full disk, say: the program must not wait for us
                sys.stderr.write(line)

    def _last_lines(self) -> str:
        return " | ".join(list(self._said)[-3:]) or "it said nothing"


_shared: dict[tuple[type, str], InterpreterHost] = {}
_sharing = threading.Lock()
