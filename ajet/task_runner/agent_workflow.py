"""`AgentWorkflow` and `CliWorkflow`: run the ready agent, or the program, of `rollout.agent` as the episode's workflow.

The reward is the judge's. Without a judge it is, in this order, the environment's, what the agent itself says (its
tests, for example), 1.0 or 0.0 by comparing the answer with the task's `answer`, or the sum of what its tools gave;
else the episode fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from ajet.agents import Agent, StepType, Trajectory, make_agent
from ajet.agents.cli_agent import CliAgent, CliRun, ModelAddress
from ajet.agents.run import AgentSettingsError
from ajet.agents.tools import ToolContext
from ajet.config import Config
from ajet.config.rollout import FOR_BOTH, FOR_PROGRAMS, NOT_FOR_PROGRAMS
from ajet.environment.environment import NOTHING_OBSERVED, StepResult, observation_messages, observation_text
from ajet.environment.leased import LeasedEnvironment
from ajet.environment.sandboxes import SandboxSettings, open_sandbox
from ajet.schema.errors import AjetError, EnvironmentFault, ImportPathError, RewardError, UserError
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.schema.user_code import find_named
from ajet.task_judge.base_judge import has_judge
from ajet.task_judge.math_answer_as_judge import reference, same_answer
from ajet.task_runner.tuner import AjetTuner
from ajet.task_runner.workflow import Workflow


class EnvironmentWorld:
    """See `ajet.agents.run.World`."""

    def __init__(self, environment: LeasedEnvironment, task: Task, tools: Sequence[Mapping[str, Any]]) -> None:
        """`tools`: those that the environment offers, or its service describes."""
        self._environment = environment
        self.tools = tools
        seen = observation_messages(environment.observation)
        # a task without messages of its own has been given the observation already
        said = list(task.init_messages) == seen
        self.beginning = "" if said else "\n\n".join(filter(None, map(observation_text, seen)))

    async def act(self, action: str | Mapping[str, Any]) -> StepResult:
        given = {"role": "assistant", "content": action} if isinstance(action, str) else dict(action)
        try:
            step = await self._environment.astep(given)
        except AjetError:
            raise
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            name = self._environment.record.name
            raise EnvironmentFault(f"{name}.step raised {type(error).__name__}: {error}") from error
        return StepResult(observation_text(step.observation) or NOTHING_OBSERVED, step.reward, step.done)


AGENT_KEY = "ajet.rollout.agent"
AGENT_NO_REWARD = (
    "the agent's episode has no reward: the task has no `answer` in its metadata, no tool gave a reward, and there is "
    "no judge. Give tasks an `answer`, or set ajet.task_judge.judge_protocol"
)


def build_agent(config: Config) -> Agent:
    settings = config.ajet.rollout.agent
    assert settings is not None
    given = {key: settings[key] for key in (*NOT_FOR_PROGRAMS, *FOR_BOTH)}
    given["name"] = "" if "->" in settings.type else settings.type
    given["context_tokens"] = config.ajet.rollout.max_model_len
    try:
        return make_agent(settings.type, {**given, **settings.options}, config.base_dirs)
    except ImportPathError as error:
        raise ImportPathError(f"{AGENT_KEY}: {error}") from error
    except UserError as error:
        raise type(error)(f"{AGENT_KEY}: {error}") from error


def workflow_of(built: Agent | CliAgent) -> type[Workflow]:
    base, name = (CliWorkflow, "CliWorkflow") if isinstance(built, CliAgent) else (AgentWorkflow, type(built).__name__)
    return type(name, (base,), {"agent": built, "__module__": __name__})


class AgentWorkflow(Workflow):
    """One run of the agent per episode; the agent is shared by all."""

    agent: ClassVar[Agent]

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        environment = workflow_task.gym_env
        world = None
        if environment is not None:
            world = EnvironmentWorld(environment, workflow_task.task, await environment.atools())
        trajectory = await self.agent.run_trajectory(
            workflow_task.task,
            tuner.as_model_function(agent_name=self.agent.name),
            request_id=workflow_task.episode_uuid,
            context=ToolContext(tuner.sandbox, workflow_task.episode_uuid, workflow_task),
            world=world,
        )
        judged = has_judge(tuner.config)
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
                raise RewardError(AGENT_NO_REWARD)
            output.reward, output.is_success = reward
        return output


def output_of(trajectory: Trajectory) -> WorkflowOutput:
    """What a judge is given. Without an answer, what the model said last, as where a limit ends any other workflow."""
    answer = trajectory.final_answer
    ends = {"final_answer": answer, "stop_reason": str(trajectory.stop_reason)}
    if answer is None and trajectory.calls:
        ends["last_reply"] = trajectory.calls[-1].reply.get("content") or ""
    return WorkflowOutput(metadata={**trajectory.metadata, **ends}, log_metrics=_metrics(trajectory))


def reward_of(trajectory: Trajectory, task: Task) -> tuple[float, bool | None] | None:
    """The outcome, without a judge, and whether it is a success. None: nothing says what the run is worth."""
    if trajectory.reward is not None:
        return trajectory.reward, trajectory.is_success
    if task.metadata.get("answer") is not None:
        return _compared(trajectory.final_answer, task)
    if any(step.reward_score is not None for step in trajectory.steps):
        return trajectory.tool_reward, None
    return None


def _compared(answer: str | None, task: Task) -> tuple[float, bool]:
    """1.0 or 0.0, by the task's `answer`."""
    right_answer = reference(task.metadata["answer"], task.task_id)
    right = answer is not None and same_answer(answer, right_answer)
    return float(right), right


def _reward_calls(trajectory: Trajectory, tuner: AjetTuner) -> None:
    """What tools gave goes to the model calls that asked for them, on top of the outcome."""
    by_call: dict[int, float] = {}
    for step in trajectory.steps:
        if step.reward_score is not None:
            by_call[step.call] = by_call.get(step.call, 0.0) + step.reward_score
    for call, reward in by_call.items():
        tuner.reward(reward, call=trajectory.calls[call].reply_id)


def _metrics(trajectory: Trajectory) -> dict[str, float]:
    results = [step for step in trajectory.steps if step.step_type is StepType.ACTION_RESULT]
    return {
        "agent/steps": sum(not call.purpose for call in trajectory.calls),
        "agent/tool_calls": len(results),
        "agent/failed_tool_calls": sum(step.success is False for step in results),
        "agent/completed": float(trajectory.is_completed),
    }


PROGRAM_NO_REWARD = (
    "the program's episode has no reward: the task has neither a `test_command` nor an `answer` in its metadata, and "
    "there is no judge. Give tasks one of the two, or set ajet.task_judge.judge_protocol"
)
OPTIONS = ("max_output_mb", "result_as", "test_command", "test_seconds")


def build_cli_agent(config: Config) -> CliAgent:
    settings = config.ajet.rollout.agent
    assert settings is not None
    known = signature(CliAgent).parameters
    for option in settings.options:
        if option not in OPTIONS:
            hint = f". ({option} is a key of rollout.agent itself.)" if option in known else ""
            raise AgentSettingsError(
                f"{AGENT_KEY}.options: type cli has no option {option!r}; options: {', '.join(OPTIONS)}{hint}"
            )
    given = {key: settings[key] for key in (*FOR_PROGRAMS, *FOR_BOTH)}
    if (folder := settings.installed_in) is not None:
        given["installed_in"] = str(find_named(folder, config.base_dirs, Path.is_dir) or folder)
    try:
        return CliAgent(base_dirs=config.base_dirs, **given, **settings.options)
    except UserError as error:
        raise type(error)(f"{AGENT_KEY}: {error}") from error


def check_program(config: Config, settings: SandboxSettings) -> None:
    """Look for the program in a sandbox such as episodes get. Raises AgentSettingsError that says how to install it."""
    asked = config.ajet.rollout.agent
    if asked is None or asked.type != "cli":
        return
    agent = build_cli_agent(config)
    apart = replace(settings, network="none") if settings.network == "gateway" else settings

    async def look() -> None:
        async with open_sandbox(apart) as sandbox:
            await agent.check(sandbox)

    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        try:
            thread.submit(asyncio.run, look()).result()
        except AgentSettingsError as error:
            raise AgentSettingsError(f"{AGENT_KEY}: {error}") from None


class CliWorkflow(Workflow):
    """One run of the program per episode."""

    agent: ClassVar[CliAgent]

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        sandbox, task = tuner.sandbox, workflow_task.task
        assert sandbox is not None, "refused when the config was read"
        base_url, api_key, model = tuner.as_oai_baseurl_apikey(agent_name=self.agent.name)
        address = ModelAddress(sandbox.gateway_url or base_url, api_key, model)
        run = await self.agent.run(task, task.metadata, sandbox, address, task_id=task.task_id)
        output = output_of_run(run)
        if not has_judge(tuner.config):
            output.reward, output.is_success = reward_of_run(run, task)
        return output


def output_of_run(run: CliRun) -> WorkflowOutput:
    facts: dict[str, Any] = {"final_answer": run.answer, "stop_reason": str(run.stop_reason)}
    facts |= {"exit_code": run.exit_code, "output": run.output}
    if run.verdict is not None:
        facts["tests"] = run.verdict.facts()
    metrics = {"agent/failed_exit": float(run.exit_code != 0), "agent/seconds": run.seconds}
    return WorkflowOutput(metadata=facts, log_metrics=metrics)


def reward_of_run(run: CliRun, task: Task) -> tuple[float, bool]:
    if run.verdict is not None:
        return float(run.verdict.passed), run.verdict.passed
    if task.metadata.get("answer") is None:
        raise RewardError(PROGRAM_NO_REWARD)
    return _compared(run.answer, task)
