"""The ready agents: `ReActAgent`, `ToolAgent`. (`CodingAgent` has a file of its own.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ajet.agents.agent import Agent
from ajet.agents.run import AgentRun
from ajet.agents.tools import make_tools
from ajet.agents.tools.tool import Tool


class ReActAgent(Agent):
    """Thinks, calls tools, sees their results, and goes on until it answers.

    With native tool calls, a reply without one is the answer; in the text format, `Final Answer:` marks it.
    """

    system_prompt_default = "Solve the task step by step. Use the tools where they help, then give the final answer."


class ToolAgent(Agent):
    """Calls exactly one tool in each step, and ends by calling `finish` with the answer."""

    system_prompt_default = (
        "Work on the task with the tools, one tool call in each step. When you know the answer, call finish with it."
    )
    one_call_per_step = True

    def __init__(self, *, tools: Sequence[Any] = (), **settings: Any) -> None:
        super().__init__(tools=tools, **settings)
        if not any(isinstance(tool, Tool) and tool.name in ("finish", "submit") for tool in self.tools):
            self.tools += make_tools(["finish"])

    async def answered(self, run: AgentRun, answer: str, call: int) -> None:
        self.tell(run, "Call a tool. When you know the answer, call finish with it.")
