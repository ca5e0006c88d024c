"""Small environments for tests. Also imported by the programs that the tests start."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from ajet.environment import Environment, StepResult
from ajet.schema.task import Task


class Several:
    """Like an array of numpy's: it is neither true nor false."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")

    def __str__(self) -> str:
        return "several"


class Counter(Environment):
    """Counts to three; the reward is 0.25 for each step. What the agent says may make it misbehave."""

    def __init__(self, log: str = "", size: int = 3) -> None:
        self.log = log
        self.size = size
        self.count = 0

    @staticmethod
    def task_ids(split: str) -> list[str]:
        return [f"{split}-{number}" for number in range(3)]

    def _write(self, line: str) -> None:
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(line + "\n")

    def reset(self, task: Task) -> Any:
        self.count = 0
        self._write("reset")
        if task.main_query == "pair":
            return "Count.", {"seed": 1}
        if task.main_query == "no reset":
            raise RuntimeError("no world today")
        return f"Count to {self.size}."

    def step(self, action: Any) -> Any:
        said = action if isinstance(action, str) else action["content"]
        if said == "raise":
            raise KeyError("mine")
        if said == "recurse":
            return self.step(action)
        if said == "nan":
            return "?", float("nan"), False, {}
        if said.startswith("half"):
            return StepResult(said, 0.0, False, {said: said})
        if said == "text":
            return "only text"
        if said == "keys":
            return StepResult("?", 0.0, False, {(0, 1): "no JSON object has such a key"})
        if said in ("zero", "array", "nothing"):
            return StepResult({"zero": 0, "array": Several(), "nothing": None}[said])
        if said == "hang":
            time.sleep(600)
        if said == "exit":
            os._exit(3)
        if said == "sys.exit":
            raise SystemExit(3)
        if said == "pid":
            return StepResult(str(os.getpid()))
        self.count += 1
        return StepResult(f"{self.count}", 0.25, self.count == self.size, {"count": self.count})

    def close(self) -> None:
        self._write("close")


class AsyncCounter(Counter):
    """The same, with coroutines."""

    async def reset(self, task: Task) -> Any:
        await asyncio.sleep(0)
        return super().reset(task)

    async def step(self, action: Any) -> Any:
        if action == "wait":
            self._write("waits")
            await asyncio.sleep(600)
        return super().step(action)

    async def close(self) -> None:
        super().close()


class Leaving(AsyncCounter):
    """Ends the program as it closes."""

    async def close(self) -> None:
        raise SystemExit(3)


class Lingering(Counter):
    """Takes a moment to close."""

    def close(self) -> None:
        time.sleep(0.3)
        super().close()


class Judging(Counter):
    """Has a reward of its own for the whole episode."""

    def evaluate(self) -> float:
        return float(self.count == self.size)


class Misjudging(Counter):
    """What the agent said last decides how judging fails."""

    said = ""

    def step(self, action: Any) -> Any:
        self.said = action if isinstance(action, str) else action["content"]
        return StepResult("?", 0.0, done=True)

    def evaluate(self) -> Any:
        if self.said == "exit":
            os._exit(3)
        return {"nan": float("nan"), "text": "1.0", "list": [1.0], "nothing": None}[self.said]


class Large(Counter):
    """Needs a gigabyte."""

    def reset(self, task: Task) -> Any:
        self.memory = bytearray(1024**3)
        return "large"


class Detaching(Counter):
    """What the agent names as a file is where a process that detaches itself writes its number."""

    def step(self, action: Any) -> Any:
        from support.detached import detach  # programs that know nothing of `support` import this file, too

        detach(action["content"])
        return StepResult("detached")
