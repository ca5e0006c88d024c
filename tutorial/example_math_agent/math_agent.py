"""The math agent in AgentScope 2.x: a ReAct loop with a calculator and Python."""

from __future__ import annotations

from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.message import UserMsg
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from math_tools import SYSTEM_PROMPT, TOOLS

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

ALLOW = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="confined by the tool itself")


class MathAgentWorkflow(Workflow):
    name: str = "math_agent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        agent = Agent(
            name="math_agent",
            system_prompt=SYSTEM_PROMPT,
            model=tuner.as_agentscope_model(agent_name="math_agent"),
            toolkit=Toolkit(tools=[FunctionTool(tool, is_read_only=True, permission=ALLOW) for tool in TOOLS.values()]),
            react_config=ReActConfig(max_iters=tuner.config.ajet.rollout.multi_turn.max_steps),
            # Prompts with the time of day would make no two episodes begin alike: runs could not be repeated.
            injection_config=InjectionConfig(inject_runtime_state=False),
        )
        reply = await agent.reply(UserMsg("user", workflow_task.task.main_query))
        return WorkflowOutput(metadata={"final_answer": reply.get_text_content() or ""})
