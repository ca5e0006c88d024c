"""`Child`: the engine's process as its owner sees it: started, written to, ended.

`process` is what runs in it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ajet.engine.torch.engine import JOIN_SECONDS
from ajet.engine.torch.process_messages import Order, frame
from ajet.engine.torch.shared_weights import SharedWeights
from ajet.schema.errors import EngineError

PROGRAM = "ajet.engine.torch.process"
ROOT = Path(__file__).parents[3]


class Child:
    """A process, and what is on its way to it. A thread writes: a process that stands still must not stop a loop."""

    def __init__(self, shared: SharedWeights) -> None:
        self.end, its = socket.socketpair()
        handed = (its.fileno(), shared.descriptor)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            # a session of its own: Ctrl-C is for the program, which ends it
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, str(its.fileno()), str(os.getpid())],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=2,  # ours may be read by a program
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            self.end.close()
            raise EngineError(f"the embedded engine's process can't be started: {error}") from error
        finally:
            its.close()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="ajet-engine-orders", daemon=True).start()

    def send(self, order: Order) -> None:
        self._orders.put(order)

    def _write(self) -> None:
        while (order := self._orders.get()) is not None:
            with suppress(OSError):  # it has died: the reading thread sees it too
                self.end.sendall(frame(order))

    def hang_up(self) -> None:
        """Have it end, and the threads that talk to it."""
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def end_it(self, *, at_once: bool = False) -> str:
        """Wait for its end, kill it if it doesn't come or `at_once`, and say how it ended."""
        self._orders.put(None)
        self.hang_up()
        if at_once:
            self.process.kill()
        try:
            code = self.process.wait(JOIN_SECONDS / 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.end.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
