"""The numbers game: combine the given numbers with + - * to make the target, in at most three tries.

An episode is one conversation of up to three turns. The agent writes an expression and is told what it makes. The
reward is 1 if the first try makes the target, and 0.2 less for each further try.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

TRIES = 3
LATER_TRY = 0.2
"""The cost of each try after the first."""
LONGEST = 100
"""Longer expressions are not read."""
EXPRESSION = re.compile(r"[\d+\-*() ]*")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class CountdownWorkflow(Workflow):
    name: str = "countdown"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        game = workflow_task.task.metadata
        numbers, target = [int(number) for number in game["numbers"]], int(game["target"])
        client = tuner.as_raw_openai_sdk_client(agent_name="player")
        messages = [{"role": "user", "content": question(numbers, target)}]
        said = []
        for tries in range(1, TRIES + 1):
            completion = await client.chat.completions.create(model="player", messages=messages)
            said.append(completion.choices[0].message.content or "")
            if makes(said[-1], numbers) == target:
                reward = 1.0 - LATER_TRY * (tries - 1)
                return WorkflowOutput(reward=reward, is_success=True, log_metrics={"tries": tries})
            messages.append({"role": "assistant", "content": said[-1]})
            messages.append({"role": "user", "content": verdict(said[-1], numbers)})
        return WorkflowOutput(
            reward=0.0, is_success=False, log_metrics={"tries": TRIES, "repeated": len(said) - len(set(said))}
        )


def question(numbers: list[int], target: int) -> str:
    """The question."""
    return f"{' '.join(map(str, numbers))} make {target}"


def verdict(reply: str, numbers: list[int]) -> str:
    """The answer to a try that missed."""
    made = makes(reply, numbers)
    return "not an expression of these numbers" if made is None else f"no, {made}"


def makes(expression: str, numbers: list[int]) -> int | None:
    """The value of the expression, or None unless it uses each number once, with + - * and brackets."""
    if len(expression) > LONGEST or not EXPRESSION.fullmatch(expression):
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    used: list[int] = []
    value = _value(tree, used)
    return value if Counter(used) == Counter(numbers) else None


def _value(node: ast.expr, used: list[int]) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and (compute := OPERATORS.get(type(node.op))) is not None:
        left, right = _value(node.left, used), _value(node.right, used)
        return None if left is None or right is None else compute(left, right)
    return None
