"""Solves a problem with the calculator of an MCP server. The reward: is the number at the end the result?

`calc_agent` is a ready agent with our MCP tools, `autogen_agent` the same with AutoGen. Both are plain functions.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from ajet import LLM, rollout
from ajet.agents import ReActAgent
from ajet.agents.model_function import ModelFunction

SYSTEM = "Solve the problem. Use the calculator. End with the answer alone, as ### ANSWER: number"
SERVER = [sys.executable, "-m", "mcp_server_calculator"]


def is_right(answer: str, result: str) -> bool:
    """Whether the last number of an answer is the result, to four decimals."""
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", answer)
    return bool(numbers) and round(float(numbers[-1].replace(",", "")) - float(result), 4) == 0


@rollout
async def calc_agent(task: dict[str, str], model: ModelFunction) -> bool:
    agent = ReActAgent(tools=[{"mcp": {"command": SERVER}}], system_prompt=SYSTEM, max_steps=5)
    done = await agent.run_trajectory(task["main_query"], model)
    return is_right(done.final_response, task["result"])


@rollout
async def autogen_agent(task: dict[str, str], llm: LLM) -> bool:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams

    able: Any = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    client = OpenAIChatCompletionClient(
        model=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key, model_info={**able, "family": "unknown"}
    )
    server = StdioServerParams(command=SERVER[0], args=SERVER[1:], read_timeout_seconds=60)
    async with McpWorkbench(server) as workbench:
        agent = AssistantAgent(
            "calc", model_client=client, workbench=workbench, system_message=SYSTEM, max_tool_iterations=5
        )
        done = await agent.run(task=task["main_query"])
    await client.close()
    return is_right(str(done.messages[-1].content), task["result"])  # type: ignore[union-attr]
