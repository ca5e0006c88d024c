"""`SymbolicCheck`: asks the library math-verify whether two mathematical expressions are the same.

The library can take any time and memory for a model's answer, and its own limits use signals, which only work in main
threads. So it runs in child processes, each with a memory limit, and one that exceeds the time limit is killed. It is
never imported here.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ajet.schema.errors import JudgeFault, MissingDependencyError
from ajet.schema.install import install_command
from ajet.system.processes import ChildProcess

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("symbolic_child.py")
LIMIT_S = 5.0
"""The time limit of one comparison. Different answers take longest; each one in the docs' table takes less than 2 s."""
START_S = 120.0
"""The time limit of a child's imports, on a busy machine."""
PROCESSES = 2
"""The maximum number of children. A comparison takes about 20 ms, so more are rarely needed."""


def compared_by(wanted: bool | None) -> str:
    """What compares answers, given `task_judge.math_verify` and the installed packages. Scores depend on it."""
    if wanted is False or find_spec("math_verify") is None:
        return "exact rules alone"
    return f"exact rules, then math-verify {version('math-verify')}"


def symbolic_check(wanted: bool | None) -> SymbolicCheck | None:
    """The check that `task_judge.math_verify` asks for, or None. Raises MissingDependencyError if it is required and
    not installed."""
    installed = find_spec("math_verify") is not None
    if wanted and not installed:
        raise MissingDependencyError(
            f"ajet.task_judge.math_verify: the package math-verify is not installed: {install_command('math')}, or "
            "set it to false"
        )
    if wanted is None:
        way = "math-verify compares" if installed else "math-verify is not installed, so our exact rules alone compare"
        log.info("MathAnswerAsJudge: %s the answers that aren't plain numbers", way)
    return SymbolicCheck() if installed and wanted is not False else None


class SymbolicCheck:
    """Compares expressions in child processes. Any thread may use it."""

    def __init__(self, limit_s: float = LIMIT_S, processes: int = PROCESSES) -> None:
        self._limit_s = limit_s
        self._children: queue.LifoQueue[ChildProcess | None] = queue.LifoQueue()
        """One slot for each process. None: not started yet, or ended."""
        for _ in range(processes):
            self._children.put(None)
        self._warned = threading.Event()

    def same(self, given: str, expected: str) -> bool:
        """Whether they are equal. False if that can't be determined within the limits."""
        answer = self._answer(given, expected)
        if answer is None and not self._warned.is_set():
            self._warned.set()
            log.warning(
                "math-verify could not compare %.80r with %.80r within %g s or its memory limit; that counts as wrong",
                given,
                expected,
                self._limit_s,
            )
        return bool(answer)

    def close(self) -> None:
        """End the idle children. They also end with this process."""
        for _ in range(self._children.qsize()):
            child = self._children.get()
            if child is not None:
                child.end()
            self._children.put(None)

    def _answer(self, given: str, expected: str) -> bool | None:
        child = self._children.get()
        reusable = None
        try:
            if child is None or not child.alive:
                child = self._started()
            said = child.ask(json.dumps({"given": given, "expected": expected}).encode() + b"\n", self._limit_s)
            reusable = child
            answer: bool | None = json.loads(said)["same"]
            return answer
        except (TimeoutError, ConnectionError):
            return None
        finally:
            if child is not None and reusable is None:
                child.end()
            self._children.put(reusable)

    def _started(self) -> ChildProcess:
        child = ChildProcess(PROGRAM, str(self._limit_s))
        try:
            child.ask(b"{}\n", START_S)
        except (TimeoutError, ConnectionError):
            child.end()
            raise JudgeFault(
                f"math-verify did not start within {START_S:g} s: try `python -c 'import math_verify'`"
            ) from None
        return child
