"""`CliWorkflow`: runs the program of `rollout.agent` (`type: cli`) as the episode's workflow.

The reward is the judge's. Without a judge, it is the task's tests, or the end of what the program printed is compared
with the task's `answer`; else the episode fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ajet.agents.cli_agent import CliAgent, CliRun, ModelAddress
from ajet.agents.limits import AgentSettingsError
from ajet.sandbox import SandboxSettings, open_sandbox
from ajet.schema.errors import RewardError, UserError
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.math_answer_as_judge import same_answer
from ajet.workflow import Workflow

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.tuner import AjetTuner

AGENT_KEY = "ajet.rollout.agent"
NO_REWARD = (
    "the program's episode has no reward: the task has neither a `test_command` nor an `answer` in its metadata, and "
    "there is no judge. Give tasks one of the two, or set ajet.task_judge.judge_protocol"
)
OPTIONS = ("max_output_mb", "result_as", "test_command", "test_seconds")
EXIT_CODE = "exit_code"
OUTPUT = "output"


def build_cli_agent(config: Config, base_dirs: Sequence[Path] = ()) -> CliAgent:
    """The program of `rollout.agent`."""
    settings = config.ajet.rollout.agent
    assert settings is not None
    known = signature(CliAgent).parameters
    for option in settings.options:
        if option not in OPTIONS:
            hint = f". ({option} is a key of rollout.agent itself.)" if option in known else ""
            raise AgentSettingsError(
                f"{AGENT_KEY}.options: type cli has no option {option!r}; options: {', '.join(OPTIONS)}{hint}"
            )
    installed = settings.installed_in
    if installed is not None:
        bases = [Path(base) / Path(installed).expanduser() for base in (*base_dirs, Path.cwd())]
        installed = next((str(place.resolve()) for place in bases if place.is_dir()), installed)
    try:
        return CliAgent(
            program=settings.program,
            command=settings.command,
            setup=settings.setup,
            env=settings.env,
            files=settings.files,
            installed_in=installed,
            model_name=settings.model_name,
            system_prompt=settings.system_prompt,
            max_seconds=settings.max_seconds,
            base_dirs=base_dirs,
            **settings.options,
        )
    except UserError as error:
        raise type(error)(f"{AGENT_KEY}: {error}") from error


def check_program(config: Config, settings: SandboxSettings, base_dirs: Sequence[Path] = ()) -> None:
    """Look for the program in a sandbox such as episodes get. Raises AgentSettingsError that says how to install it."""
    asked = config.ajet.rollout.agent
    if asked is None or asked.type != "cli":
        return
    agent = build_cli_agent(config, base_dirs)
    apart = replace(settings, network="none") if settings.network == "gateway" else settings

    async def look() -> None:
        async with open_sandbox(apart) as sandbox:
            await agent.check(sandbox)

    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        try:
            thread.submit(asyncio.run, look()).result()
        except AgentSettingsError as error:
            raise AgentSettingsError(f"{AGENT_KEY}: {error}") from None


def cli_workflow_of(built: CliAgent) -> type[CliWorkflow]:
    """The workflow that runs this program."""

    class Built(CliWorkflow):
        agent: ClassVar[CliAgent] = built

    Built.__name__ = Built.__qualname__ = "CliWorkflow"
    return Built


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
        if tuner.config.ajet.task_judge.judge_protocol is None:
            output.reward, output.is_success = reward_of_run(run, task)
        return output


def output_of_run(run: CliRun) -> WorkflowOutput:
    """What is recorded, and a judge is given."""
    facts: dict[str, Any] = {
        "final_answer": run.answer,
        "stop_reason": str(run.stop_reason),
        EXIT_CODE: run.exit_code,
        OUTPUT: run.output,
    }
    if run.verdict is not None:
        facts["tests"] = run.verdict.facts()
    failed = run.exit_code != 0
    return WorkflowOutput(
        metadata=facts, log_metrics={"agent/failed_exit": float(failed), "agent/seconds": run.seconds}
    )


def reward_of_run(run: CliRun, task: Task) -> tuple[float, bool]:
    """Without a judge."""
    if run.verdict is not None:
        return float(run.verdict.passed), run.verdict.passed
    expected = task.metadata.get("answer")
    if expected is None:
        raise RewardError(NO_REWARD)
    right = same_answer(run.answer, str(expected))
    return float(right), right
