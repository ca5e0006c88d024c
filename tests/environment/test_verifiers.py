"""Environments of the package verifiers, played by the real package in an environment of its own, on a model of ours.

Runs with `make test-verifiers`, or with AJET_VERIFIERS_PYTHON naming an interpreter that has verifiers and uv.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ajet.config import load_config
from ajet.environment.verifiers_client import VerifiersHost
from ajet.schema.episode import EpisodeStatus
from ajet.schema.errors import ConfigError
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
from ajet.task_runner.runtime import Runtime

PYTHON = os.environ.get("AJET_VERIFIERS_PYTHON")
needs_verifiers = pytest.mark.skipif(not PYTHON, reason="AJET_VERIFIERS_PYTHON names no interpreter with verifiers")

TASKSET = """
import asyncio

import verifiers.v1 as vf


class AdditionData(vf.TaskData):
    answer: str = ""


class AdditionTask(vf.Task[AdditionData]):
    async def setup(self, trace, runtime) -> None:
        if "7" in self.data.prompt:
            await asyncio.sleep(60)

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if "9" in self.data.prompt:
            raise RuntimeError("no reward for nines")
        if "8" in self.data.prompt:
            await asyncio.sleep(60)
        said = [node.message for node in trace.nodes if getattr(node.message, "role", "") == "assistant"]
        return float(bool(said) and str(said[-1].content).strip() == self.data.answer)


class AdditionConfig(vf.TasksetConfig):
    size: int = 4


class AdditionTaskset(vf.Taskset[AdditionTask, AdditionConfig]):
    def load(self):
        for i in range(self.config.size):
            data = AdditionData(prompt=f"{i} + 1 =", answer=str(i + 1))
            yield AdditionTask(data, self.config.task)


__all__ = ["AdditionTaskset"]
"""


def config_of(
    folder: Path, *replies: str, python: str | None = PYTHON, wrapper: str = "asyncio", **taskset: object
) -> str:
    (folder / "replies.yaml").write_text(json.dumps(list(replies)))
    env = {"taskset": {"id": "addition", **taskset}, "agent": {"harness": {"id": "null"}}}
    config = {
        "task_reader": {
            "type": "ajet.task_reader.verifiers_tasks->VerifiersReader",
            "options": {"env": env, "python": python, "num_tasks": 100, "num_validation_tasks": 1},
        },
        "rollout": {
            "user_workflow": "ajet.task_runner.verifiers_workflow->VerifiersWorkflow",
            "engine": "scripted",
            "scripted_replies": "replies.yaml",
            "compute_madness_checklist": [],
        },
        "task_runner": {"wrapper_type": wrapper},
        "failure_reward": {"workflow_error": 0, "otherwise": 0},
    }
    (folder / "run.yaml").write_text(json.dumps({"ajet": config}))
    return str(folder / "run.yaml")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An interpreter in which the environment is installed, as far as it can tell."""
    site = tmp_path / "site"
    (site / "addition").mkdir(parents=True)
    (site / "addition" / "__init__.py").write_text(TASKSET)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {PYTHON} "$@"\n')
    interpreter.chmod(0o755)
    return tmp_path


@needs_verifiers
@pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])
def test_an_environment_is_played_with_exact_tokens(installed: Path, wrapper: str) -> None:
    config = load_config(
        config_of(installed, "2", "9", python=str(installed / "python"), wrapper=wrapper), backbone="debug"
    )
    reader = build_reader(config)
    (validation,) = read_validation_tasks(reader)
    training = read_training_tasks(reader)
    assert validation.main_query == "0 + 1 =" and [task.main_query for task in training] == [
        "1 + 1 =",
        "2 + 1 =",
        "3 + 1 =",
    ]
    with Runtime(config) as runtime:
        right = runtime.run(runtime.pool.run_episode(training[0]))
        wrong = runtime.run(runtime.pool.run_episode(training[0]))
    assert right.failure is None and wrong.failure is None
    assert right.reward == 1.0 and right.status is EpisodeStatus.COMPLETED
    (call,) = right.tree.calls
    assert [message["content"] for message in call.new_messages] == ["1 + 1 ="]
    assert call.reply["content"] == "2" and len(call.logprobs) == len(right.tree.runs[call.run].ids) > 0


@needs_verifiers
def test_an_episode_whose_setup_took_too_long_is_not_scored(installed: Path) -> None:
    path = config_of(installed, "8", python=str(installed / "python"), size=8)
    config = load_config(path, ["task_reader.options.env.agent.timeout.setup=0.5"], backbone="debug")
    tasks = read_training_tasks(build_reader(config))
    with Runtime(config) as runtime:
        episode = runtime.run(runtime.pool.run_episode(tasks[-1]))
    assert (episode.status, episode.reward) == (EpisodeStatus.ENVIRONMENT_ERROR, None)
    assert episode.failure is not None and "setup_timeout" in episode.failure.message


@needs_verifiers
def test_a_reward_that_is_missing_is_never_a_number(installed: Path) -> None:
    path = config_of(installed, "10", "9", python=str(installed / "python"), size=10)
    config = load_config(path, ["task_reader.options.env.agent.timeout.scoring=0.5"], backbone="debug")
    tasks = read_training_tasks(build_reader(config))
    with Runtime(config) as runtime:
        raised = runtime.run(runtime.pool.run_episode(tasks[-1]))
        slow = runtime.run(runtime.pool.run_episode(tasks[-2]))
    for episode, said in ((raised, "no reward for nines"), (slow, "scoring_timeout")):
        assert (episode.status, episode.reward) == (EpisodeStatus.JUDGE_ERROR, None)
        assert episode.failure is not None and said in episode.failure.message


@needs_verifiers
def test_an_environment_that_is_not_installed_is_refused(installed: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'no-such-taskset' not found.*-m pip install the environment's package"):
        VerifiersHost({"taskset": {"id": "no-such-taskset"}}, str(installed / "python")).ready()


def test_an_interpreter_without_verifiers_is_refused(tmp_path: Path) -> None:
    config = load_config(config_of(tmp_path, "2", python=sys.executable), backbone="debug")
    with pytest.raises(ConfigError, match=r"(?s)can't load this environment.*pip install 'verifiers>=0.4'"):
        build_reader(config).get_training_tasks()
    config = load_config(config_of(tmp_path, "2", python="/no/such/python"), backbone="debug")
    with pytest.raises(ConfigError, match=r"options.python: /no/such/python can't be run"):
        build_reader(config).get_training_tasks()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("task_reader.options.envv=1", "options.envv: unknown option; there are env, python"),
        ("task_reader.options.env=gsm8k", "options.env: name the environment's tasks"),
        ("task_reader.options.num_tasks=-1", "options.num_tasks should be a whole number from 0"),
    ],
)
def test_wrong_options_are_explained(tmp_path: Path, override: str, complaint: str) -> None:
    config = load_config(config_of(tmp_path, "2", python=sys.executable), [override], backbone="debug")
    with pytest.raises(ConfigError, match=complaint):
        build_reader(config).get_training_tasks()
