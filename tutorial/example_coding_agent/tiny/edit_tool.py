"""`Edit`: the one way in which the tiny model can write code: it gives a function of m.py a new body."""

from __future__ import annotations

from typing import Any, ClassVar

from ajet.agents.tools import StatelessTool, ToolContext, ToolResult


class Edit(StatelessTool):
    """Works on the file in the episode's sandbox, where the code stays."""

    name = "edit"
    description = "Write a body."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"function": {"type": "string"}, "body": {"type": "string"}},
        "required": ["function", "body"],
    }

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        assert context.sandbox is not None
        lines = (await context.sandbox.read("m.py")).decode().splitlines()
        head = f"def {arguments['function']}(x):"
        if head not in lines:
            return ToolResult("no such function", success=False)
        lines[lines.index(head) + 1] = f"    return {arguments['body']}"
        await context.sandbox.write("m.py", ("\n".join(lines) + "\n").encode())
        return ToolResult("written")
