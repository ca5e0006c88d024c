"""Ready agents over a model function, with or without training.

agent = ReActAgent(tools=["calculator"])
trajectory = await agent.run_trajectory("What is 12 * 34?", as_model_function(client, "gpt-4o-mini"))
trajectory.final_response
"""

from ajet.agents.agent import Agent
from ajet.agents.model_function import AgentReply, ModelFunction, ModelMessage, ToolCall, as_model_function
from ajet.agents.ready import CodingAgent, ReActAgent, ToolAgent, agent_names, make_agent, register_agent
from ajet.agents.run import AgentRun, AgentSettingsError
from ajet.schema.trajectory import (
    StepType,
    StopReason,
    Trajectory,
    TrajectoryStatus,
    TrajectoryStep,
    Usage,
    read_trajectory,
    write_trajectory,
)

__all__ = [
    "Agent",
    "AgentReply",
    "AgentRun",
    "AgentSettingsError",
    "CodingAgent",
    "ModelFunction",
    "ModelMessage",
    "ReActAgent",
    "StepType",
    "StopReason",
    "ToolAgent",
    "ToolCall",
    "Trajectory",
    "TrajectoryStatus",
    "TrajectoryStep",
    "Usage",
    "agent_names",
    "as_model_function",
    "make_agent",
    "read_trajectory",
    "register_agent",
    "write_trajectory",
]
