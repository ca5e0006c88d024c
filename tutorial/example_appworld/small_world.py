"""A small world with the shape of AppWorld's: apps that an agent uses by writing Python. It is not AppWorld.

It stands in for the real one in tests and for newcomers: no data to fetch, nothing of the agent's code is executed (see
`interpreter`), and the same conversation: the agent writes a fenced Python block and sees what it prints.

    ajet env serve 'tutorial/example_appworld/small_world.py->SmallWorld' --port 8081
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from apps import AppError, Apps
from interpreter import CodeError, Interpreter

from ajet import Task
from ajet.environment import Environment, StepResult
from ajet.environment.environment import action_text

SIZES = {"train": 64, "dev": 16}
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
SYSTEM = """You work for a supervisor by using apps. Write Python in a block:
```python
print(apis.api_docs.show_app_descriptions())
```
You are shown its output, and may go on with another block; names stay. \
`apis.api_docs.show_api_descriptions(app_name="notes")` and \
`apis.api_docs.show_api_doc(app_name="notes", api_name="login")` tell how an app is used. Passwords are in \
`apis.supervisor.show_account_passwords()`. When the task is done, call `apis.supervisor.complete_task()`, or \
`apis.supervisor.complete_task(answer=…)` if you were asked for something."""


class SmallWorld(Environment):
    """One task."""

    @staticmethod
    def task_ids(split: str) -> Iterable[str]:
        return [f"{split}-{number}" for number in range(SIZES.get(split, 0))]

    def reset(self, task: Task) -> list[dict[str, str]]:
        self._apps = Apps(task.task_id)
        self._interpreter = Interpreter(self._call)
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"The supervisor's task: {self._apps.assignment.text}"},
        ]

    def step(self, action: Any) -> StepResult:
        block = BLOCK.search(action_text(action))
        output = self._interpreter.run(block[1]) if block else "Write a Python block: ```python … ```"
        return StepResult(f"Output:\n```\n{output}\n```", done=self._apps.world.completed)

    def evaluate(self) -> float:
        """The share of the task's tests that pass."""
        results = self._apps.test_results()
        return sum(results.values()) / len(results)

    def _call(self, app: str, name: str, arguments: dict[str, Any]) -> Any:
        try:
            return self._apps.call(app, name, arguments)
        except AppError as error:
            raise CodeError(str(error)) from None
