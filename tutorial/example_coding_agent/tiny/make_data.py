"""Generates the tiny model's tasks, and conversations of a programmer with mixed habits.

In two of five conversations, the tests are run first, and the function they name is repaired; in the others, some
function is rewritten without looking. Imitation learns both habits; reinforcement learning finds out which one pays.

python tutorial/example_coding_agent/tiny/make_data.py
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

BODIES = {"double": "x + x", "square": "x * x", "negate": "-x", "half": "x // 2", "next": "x + 1", "last": "x % 10"}
SIZES = {"validation": 64, "train": 256}
CONVERSATIONS = 1024
SHARE_WITH_TESTS = 0.4
SYSTEM = "Repair m.py."
TESTS = """\
import m

for name, body in {bodies!r}.items():
    if getattr(m, name)(37) != eval(body, {{"x": 37}}):
        raise SystemExit(name + " is wrong")
"""


def task(draw: random.Random, name: str) -> dict[str, Any]:
    """Three functions, one of them broken."""
    functions = draw.sample(sorted(BODIES), 3)
    broken = draw.choice(functions)
    bodies = {function: BODIES[function] for function in functions}
    lines = [
        f"def {function}(x):\n    return {'x' if function == broken else BODIES[function]}\n" for function in functions
    ]
    return {
        "id": name,
        "question": f"{', '.join(functions)}: one is wrong.",
        "files": {"m.py": "\n".join(lines)},
        "test_files": {"t.py": TESTS.format(bodies=bodies)},
        "test_command": "python3 t.py",
        "functions": functions,
        "broken": broken,
    }


def asks(name: str, **arguments: str) -> dict[str, Any]:
    """A tool call."""
    call = {"id": "call", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def told(text: str) -> dict[str, Any]:
    """A tool's result."""
    return {"role": "tool", "tool_call_id": "call", "content": text}


def conversation(draw: random.Random, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """One of the programmer's conversations."""
    given = task(draw, "")
    chosen = draw.choice(given["functions"])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": given["question"]}]
    if draw.random() < SHARE_WITH_TESTS:
        chosen = given["broken"]
        messages += [asks("run_tests"), told(f"{chosen} is wrong\n(exit code 1)")]
    messages += [asks("edit", function=chosen, body=BODIES[chosen]), told("written")]
    return {"messages": [*messages, {"role": "assistant", "content": "Done."}], "tools": tools}


async def schemas() -> list[dict[str, Any]]:
    """The tools as the agent shows them to the model."""
    from edit_tool import Edit

    from ajet.agents import CodingAgent
    from ajet.tools import Toolset
    from ajet.tools.tool import ToolContext

    agent, context = CodingAgent(tools=[Edit()], test_command="true"), ToolContext()
    async with Toolset(agent.run_tools(context), context) as toolset:
        return list(toolset.schemas())


def main() -> None:
    draw = random.Random(7)
    data = FOLDER / "data"
    data.mkdir(exist_ok=True)
    for split, size in SIZES.items():
        lines = [json.dumps(task(draw, f"{split}-{index}")) + "\n" for index in range(size)]
        (data / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    tools = asyncio.run(schemas())
    talks = [json.dumps(conversation(draw, tools)) + "\n" for _ in range(CONVERSATIONS)]
    (data / "conversations.jsonl").write_text("".join(talks), encoding="utf-8")


if __name__ == "__main__":
    main()
