"""The math agent in AgentScope 1.0.x, whose agents and tools look different from 2.x."""

from __future__ import annotations

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse
from math_tools import SYSTEM_PROMPT, TOOLS

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


async def calculator(expression: str) -> ToolResponse:
    """Evaluate an arithmetic expression.

    Args:
        expression (str): the expression, with + - * / // % ** and brackets.
    """
    return ToolResponse(content=[TextBlock(type="text", text=TOOLS["calculator"](expression))])


class MathAgentWorkflow(Workflow):
    name: str = "math_agent_agentscope1"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        toolkit = Toolkit()
        toolkit.register_tool_function(calculator)
        agent = ReActAgent(
            name="math_agent",
            sys_prompt=SYSTEM_PROMPT,
            model=tuner.as_agentscope_model(agent_name="math_agent"),
            formatter=OpenAIChatFormatter(),
            toolkit=toolkit,
            memory=InMemoryMemory(),
            max_iters=tuner.config.ajet.rollout.multi_turn.max_steps,
        )
        agent.set_console_output_enabled(False)
        reply = await agent(Msg("user", workflow_task.task.main_query, "user"))
        return WorkflowOutput(metadata={"final_answer": reply.get_text_content() or ""})
