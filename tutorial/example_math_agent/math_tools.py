"""The math agent's tools, shared by all its versions: a calculator, and Python in a confined process.

Both return text even if the input is wrong, so that the model can read the error and try again.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from confined_python import run_python

SYSTEM_PROMPT = (
    "You solve math problems. Use the tools for every calculation. "
    "Give the final answer as \\boxed{number}, with nothing after it."
)

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST_EXPONENT = 64  # 9**9**9 would use up all memory
_LARGEST_NUMBER = 10**30


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Expression):
        return _value(node.body)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
            raise ValueError(f"exponent above {_LARGEST_EXPONENT}")
        if max(abs(left), abs(right)) > _LARGEST_NUMBER:
            raise ValueError("number too large")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("only numbers, + - * / // % ** and brackets")


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression such as (12 * 7) - 15.

    Args:
        expression (str): the expression, with + - * / // % ** and brackets.
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval"))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error}"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


TOOLS: dict[str, Callable[..., str]] = {"calculator": calculator, "run_python": run_python}

TOOL_SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run_python",
            "description": "Run a short Python program and return what it prints.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    },
]


def call_tool(name: str, arguments: str) -> str:
    """Run a tool call, given its name and its arguments as the model's JSON."""
    if name not in TOOLS:
        return f"error: no tool named {name!r}; there are {', '.join(TOOLS)}"
    try:
        return TOOLS[name](**json.loads(arguments))
    except (json.JSONDecodeError, TypeError) as error:
        return f"error: wrong arguments for {name}: {error}"
