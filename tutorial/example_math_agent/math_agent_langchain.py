"""The math agent in LangChain: `create_agent` runs the loop (on LangGraph)."""

from __future__ import annotations

from langchain.agents import create_agent
from math_tools import SYSTEM_PROMPT, TOOLS

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class MathAgentWorkflow(Workflow):
    name: str = "math_agent_langchain"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        agent = create_agent(
            tuner.as_langchain_model(agent_name="math_agent"),
            tools=list(TOOLS.values()),
            system_prompt=SYSTEM_PROMPT,
        )
        steps = tuner.config.ajet.rollout.multi_turn.max_steps
        state = await agent.ainvoke(
            {"messages": [{"role": "user", "content": workflow_task.task.main_query}]},
            config={"recursion_limit": 2 * steps + 1},  # LangGraph counts steps of the model and of the tools
        )
        return WorkflowOutput(metadata={"final_answer": state["messages"][-1].text})
