"""`ServiceKeeper`: keeps one service running for the length of a run.

A service that ends is started again after a pause, a limited number of times; each end and each start is in the log.
Episodes that were using it fail with what their client saw, and are run again like after any other fault.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from ajet.system.services import Service, ServiceError, Started, answers, say_at_once, start_command, wait_for

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often it looks whether the service's process has ended."""
ASK_S = 2.0
"""How often it asks a service that went to the background whether it still answers."""
FIRST_PAUSE_S = 0.5
"""The pause before the first start in a row. Clients of a service wait longer than that and its start together."""
LONGEST_PAUSE_S = 30.0
STEADY_S = 300.0
"""A service that ran for so long has recovered: its starts are counted from zero."""


class ServiceKeeper:
    """Starts a service, starts it again if it ends, and ends it."""

    def __init__(self, service: Service, prefix: str = "") -> None:
        self._service = service
        self._prefix = prefix
        self._running = ExitStack()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, say: Callable[[str], None] = say_at_once) -> None:
        """Start it and wait until it answers. Raises `ServiceError`."""
        try:
            started = self._start_once(say)
        except BaseException:  # Ctrl-C too: nothing that was started may stay
            self._running.close()
            raise
        self._thread = threading.Thread(target=self._keep, args=(started,), name="ajet-service", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._ending.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self._running.close()

    def _start_once(self, say: Callable[[str], None]) -> Started:
        service = self._service
        command = ["bash", "-c", service.command]
        started = self._running.enter_context(
            start_command(service.name, command, cwd=service.folder, prefix=self._prefix, env=service.env, say=say)
        )
        if service.address is not None:
            wait_for(service, started, self._ending, say)
        return started

    def _keep(self, started: Started) -> None:
        """Until the run ends, or the service has ended too often."""
        restarts, began = 0, time.monotonic()
        while (end := self._wait_for_end(started)) is not None:
            if time.monotonic() - began > STEADY_S:
                restarts = 0
            next_start: Started | None = None
            while next_start is None:
                if restarts >= self._service.restarts:
                    self._give_up(end, restarts)
                    return
                pause = min(FIRST_PAUSE_S * 2**restarts, LONGEST_PAUSE_S)
                restarts += 1
                log.warning("%s\n    start %d of %d follows in %g s", end, restarts, self._service.restarts, pause)
                if self._ending.wait(pause):
                    return
                try:
                    next_start = self._start_again()
                except (ServiceError, OSError) as error:
                    end = str(error)
            started, began = next_start, time.monotonic()

    def _start_again(self) -> Started:
        self._running.close()  # what the old one left behind would hold its port
        self._running = ExitStack()
        return self._start_once(lambda text: log.warning("%s", text))

    def _give_up(self, end: str, restarts: int) -> None:
        often = f"It was started again {restarts} times already" if restarts else "It may not be started again"
        log.error("%s\n    %s (`restarts`): episodes that need it will fail", end, often)

    def _wait_for_end(self, started: Started) -> str | None:
        """How the service ended. None: the run ended first, or the service was done."""
        code = started.process.poll()
        while code is None:
            if self._ending.wait(LOOK_S):
                return None
            code = started.process.poll()
        if code == 0:
            if self._service.address is None:
                return None
            while answers(self._service.address) or answers(self._service.address):  # twice: it may only be busy
                if self._ending.wait(ASK_S):
                    return None
        if self._ending.is_set():
            return None
        return f"the service {self._service.name} {_how(code)}. Its log: {started.log}\n    {started.last_lines()}"


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "answers no more"
