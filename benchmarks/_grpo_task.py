"""The task of `grpo_step.py` for both sides: a calculator question, one tool call, one answer. Imports neither library.

Rewards are random: the benchmark measures time, and no group may be skipped because its rewards are equal.
"""

from __future__ import annotations

import json
import random
from typing import Any

SYSTEM_PROMPT = (
    "Use the calculator, then answer. You are given one question about whole numbers. First call the calculator with "
    "the expression exactly as it stands in the question, then read what it returns, and give that number as the "
    "answer, in a box. Never guess a result, however easy it looks."
)

QUESTIONS = 512
MAX_REPLY = 48
"""Tokens of one reply."""
TASKS_PER_STEP = 8
EPISODES_PER_TASK = 8


def calculator(expression: str):  # type: ignore[no-untyped-def]  # TRL would put the type into the prompt
    """Evaluate an arithmetic expression.

    Args:
        expression: The expression.
    """
    total, sign, number = 0, 1, ""
    for character in [*str(expression).replace(" ", ""), "="]:
        if character.isdecimal():
            number += character
        elif character in "+-=" and number:
            total, number = total + sign * int(number), ""
            sign = -1 if character == "-" else 1
        else:
            return "error: only whole numbers, + and -"
    return str(total)


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression."}},
            "required": ["expression"],
        },
    },
}


def expression(rng: random.Random) -> str:
    return f"{rng.randrange(10, 1000)}{rng.choice('+-')}{rng.randrange(10, 1000)}"


def question(asked: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"What is {asked}?"}]


def demonstration(rng: random.Random) -> list[dict[str, Any]]:
    """A conversation as the model is to lead it: a tool call, then the answer."""
    asked = expression(rng)
    function = {"name": "calculator", "arguments": json.dumps({"expression": asked})}
    return [
        *question(asked),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call", "content": calculator(asked)},
        {"role": "assistant", "content": f"\\boxed{{{calculator(asked)}}}"},
    ]
