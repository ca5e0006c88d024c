"""The quickstart's calculator as a tool of a ready agent, described in the words that its tiny model knows."""

from __future__ import annotations

from typing import Any

from workflow import TOOLS, calculator

from ajet.agents.tools import StatelessTool, ToolContext, ToolResult


class QuickstartCalculator(StatelessTool):
    """Whole numbers with + - and *."""

    name = "calculator"
    description = TOOLS[0]["function"]["description"]
    parameters = TOOLS[0]["function"]["parameters"]

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult(calculator(arguments["expression"]))
