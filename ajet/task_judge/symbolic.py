"""`SymbolicCheck`: asks the library math-verify whether two mathematical expressions are the same.

The library can take any time and memory for what a model writes, and limits itself by signals, which work in main
threads only. So it runs in child processes, each with a memory limit, and one that exceeds the time limit is killed.
Nothing of it is imported here.
"""

from __future__ import annotations

import json
import logging
import queue
import select
import subprocess
import sys
import threading
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from ajet.schema.errors import JudgeFault, MissingDependencyError
from ajet.schema.install import install_command

log = logging.getLogger(__name__)

LIMIT_S = 5.0
"""For one comparison. Answers that differ take longest; all of the table in the docs take less than 2 s."""
START_S = 120.0
"""For the child's imports, on a busy machine."""
PROCESSES = 2
"""Most children at a time. A comparison takes some 20 ms, so more are rarely needed."""


def compared_by(wanted: bool | None) -> str:
    """What compares answers, by `task_judge.math_verify` and what is installed: scores depend on it."""
    if wanted is False or find_spec("math_verify") is None:
        return "exact rules alone"
    return f"exact rules, then math-verify {version('math-verify')}"


def symbolic_check(wanted: bool | None) -> SymbolicCheck | None:
    """By `task_judge.math_verify`. Raises MissingDependencyError if it is wanted and not installed."""
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
    """May be used from several threads."""

    def __init__(self, limit_s: float = LIMIT_S, processes: int = PROCESSES) -> None:
        self._limit_s = limit_s
        self._children: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(processes):
            self._children.put(None)
        self._told = threading.Event()

    def same(self, given: str, expected: str) -> bool:
        """Whether they are equal. False if that can't be found out within the limits."""
        child = self._children.get()
        try:
            if child is None or not child.alive:
                child = _Child(self._limit_s)
            answer = child.ask({"given": given, "expected": expected})
        finally:
            self._children.put(child)
        if answer is None and not self._told.is_set():
            self._told.set()
            log.warning(
                "math-verify could not compare %.80r with %.80r within %g s or its memory limit; that counts as wrong",
                given,
                expected,
                self._limit_s,
            )
        return bool(answer)

    def close(self) -> None:
        """End the children that nobody uses. They also end with this process."""
        for _ in range(self._children.qsize()):
            child = self._children.get()
            if child is not None:
                child.kill()
            self._children.put(None)


class _Child:
    """One child process, used by one thread at a time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        command = [sys.executable, "-m", "ajet.task_judge.symbolic_child", str(limit_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if self._line(START_S) is None:
            self.kill()
            raise JudgeFault(f"math-verify did not start within {START_S:g} s: try `python -c 'import math_verify'`")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: dict[str, str]) -> bool | None:
        """Its answer; None if it has none, in which case it may be dead."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        answer = self._line(self._limit_s)
        if answer is None:
            self.kill()
        return None if answer is None else answer["same"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self, limit_s: float) -> dict[str, Any] | None:
        """Its next line; None if the child ends first, or says nothing in time."""
        pipe = self._process.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], limit_s)
        line = pipe.readline() if ready else b""  # a line is written at once
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message
