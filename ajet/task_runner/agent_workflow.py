"""`AgentWorkflow`: runs the ready agent of `rollout.agent` as the episode's workflow.

The reward is the judge's. Without a judge it is, in this order, the environment's, what the agent itself says (its
tests, for example), 1.0 or 0.0 by comparing the answer with the task's `answer`, or the sum of what its tools gave;
else the episode fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ajet.agents import Agent, StepType, Trajectory, make_agent
from ajet.config import Config
from ajet.schema.errors import ImportPathError, RewardError, UserError
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.math_answer_as_judge import same_answer
from ajet.task_runner.environment_world import EnvironmentWorld
from ajet.tools import ToolContext
from ajet.tuner import AjetTuner
from ajet.workflow import Workflow

AGENT_KEY = "ajet.rollout.agent"
NO_REWARD = (
    "the agent's episode has no reward: the task has no `answer` in its metadata, no tool gave a reward, and there is "
    "no judge. Give tasks an `answer`, or set ajet.task_judge.judge_protocol"
)


def build_agent(config: Config, base_dirs: Sequence[Path] = ()) -> Agent:
    """The agent of `rollout.agent`."""
    settings = config.ajet.rollout.agent
    assert settings is not None
    given = {
        "name": "" if "->" in settings.type else settings.type,
        "system_prompt": settings.system_prompt,
        "tools": settings.tools,
        "format": settings.format,
        "max_steps": settings.max_steps,
        "max_tokens": settings.max_tokens,
        "max_seconds": settings.max_seconds,
        "max_output_chars": settings.max_output_chars,
        "context_tokens": config.ajet.rollout.max_model_len,
        "when_full": settings.when_full,
        "parallel_tool_calls": settings.parallel_tool_calls,
    }
    try:
        return make_agent(settings.type, {**given, **settings.options}, base_dirs)
    except ImportPathError as error:
        raise ImportPathError(f"{AGENT_KEY}: {error}") from error
    except UserError as error:
        raise type(error)(f"{AGENT_KEY}: {error}") from error


def workflow_of(built: Agent) -> type[AgentWorkflow]:
    """The workflow that runs this agent."""

    class Built(AgentWorkflow):
        agent: ClassVar[Agent] = built

    Built.__name__ = Built.__qualname__ = type(built).__name__
    return Built


class AgentWorkflow(Workflow):
    """One run of the agent per episode; the agent is shared by all."""

    agent: ClassVar[Agent]

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        environment = workflow_task.gym_env
        world = None if environment is None else await EnvironmentWorld.of(environment, workflow_task.task)
        trajectory = await self.agent.run_trajectory(
            workflow_task.task,
            tuner.as_model_function(agent_name=self.agent.name),
            request_id=workflow_task.episode_uuid,
            context=ToolContext(tuner.sandbox, workflow_task.episode_uuid, workflow_task),
            world=world,
        )
        judged = tuner.config.ajet.task_judge.judge_protocol is not None
        output = output_of(trajectory)
        if environment is not None and not judged:
            _reward_calls(trajectory, tuner)
            output.reward = await environment.aevaluate()
            return output
        if judged or trajectory.reward is not None or workflow_task.task.metadata.get("answer") is not None:
            _reward_calls(trajectory, tuner)
        if not judged:
            reward = reward_of(trajectory, workflow_task.task)
            if reward is None:
                raise RewardError(NO_REWARD)
            output.reward, output.is_success = reward
        return output


def output_of(trajectory: Trajectory) -> WorkflowOutput:
    """What a judge is given."""
    ends = {"final_answer": _answer(trajectory), "stop_reason": str(trajectory.stop_reason)}
    return WorkflowOutput(metadata={**trajectory.metadata, **ends}, log_metrics=_metrics(trajectory))


def reward_of(trajectory: Trajectory, task: Task) -> tuple[float, bool | None] | None:
    """The outcome, without a judge, and whether it is a success. None: nothing says what the run is worth."""
    if trajectory.reward is not None:
        return trajectory.reward, trajectory.is_success
    expected = task.metadata.get("answer")
    if expected is not None:
        answer = _answer(trajectory)
        right = answer is not None and same_answer(answer, str(expected))
        return float(right), right
    if any(step.reward_score is not None for step in trajectory.steps):
        return trajectory.tool_reward, None
    return None


def _reward_calls(trajectory: Trajectory, tuner: AjetTuner) -> None:
    """What tools gave goes to the model calls that asked for them, on top of the outcome."""
    by_call: dict[int, float] = {}
    for step in trajectory.steps:
        if step.reward_score is not None:
            by_call[step.call] = by_call.get(step.call, 0.0) + step.reward_score
    for call, reward in by_call.items():
        tuner.reward(reward, call=trajectory.calls[call].reply_id)


def _answer(trajectory: Trajectory) -> str | None:
    """The final answer; None if a limit ended the run before there was one."""
    answers = [step.content for step in trajectory.steps if step.step_type is StepType.FINAL_ANSWER]
    return answers[-1] if answers else None


def _metrics(trajectory: Trajectory) -> dict[str, float]:
    results = [step for step in trajectory.steps if step.step_type is StepType.ACTION_RESULT]
    return {
        "agent/steps": sum(not call.purpose for call in trajectory.calls),
        "agent/tool_calls": len(results),
        "agent/failed_tool_calls": sum(step.success is False for step in results),
        "agent/completed": float(trajectory.is_completed),
    }
