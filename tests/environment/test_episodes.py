"""Episodes with an environment, in threads and in processes: what workflow, judge and record see, and that it ends."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from ajet.config import load_config
from ajet.observe.episode_codec import decode_episode, encode_episode
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime
from support import SUPPORT
from support.waiting import wait_until

WORLDS = SUPPORT / "worlds.py"
AGENT = """
from ajet import Workflow, WorkflowOutput

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        env, task = workflow_task.gym_env, workflow_task.task
        messages = list(task.init_messages)
        client = tuner.as_raw_openai_sdk_client()
        done, steps = False, 0
        while not done:
            completion = await client.chat.completions.create(model="any", messages=messages)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
            observation, reward, done, info = env.step(messages[-1])
            messages.append({"role": "user", "content": observation})
            steps += 1
        return WorkflowOutput(metadata={"steps": steps, "query": task.main_query})
"""
ISOLATED = pytest.param("multi-processing", id="processes")
EVERYWHERE = pytest.mark.parametrize("wrapper", [pytest.param("asyncio", id="threads"), ISOLATED])


def play(folder: Path, *replies: str, environment: Any, wrapper: str, task: Task | None = None, **keys: Any) -> Episode:
    (folder / "agent.py").write_text(textwrap.dedent(AGENT))
    (folder / "replies.yaml").write_text(json.dumps(list(replies)))
    config = {
        "task_reader": {"type": "random_dummy"},
        "rollout": {
            "user_workflow": "agent.py->Agent",
            "engine": "scripted",
            "scripted_replies": "replies.yaml",
            "environment": environment,
            "episode_retries": 0,
            "compute_madness_checklist": [],
            **keys,
        },
        "task_judge": {"judge_protocol": "ajet.task_judge.env_service_as_judge->EnvServiceJudge"},
        "task_runner": {"wrapper_type": wrapper},
    }
    (folder / "run.yaml").write_text(json.dumps({"ajet": config}))
    with Runtime(load_config(folder / "run.yaml", backbone="debug")) as runtime:
        return runtime.run(runtime.pool.run_episode(task or Task(task_id="t")))


def events(episode: Episode) -> list[str]:
    assert episode.environment is not None
    return [event.what for event in episode.environment.events]


@EVERYWHERE
def test_the_environment_begins_the_task_and_gives_the_reward(tmp_path: Path, wrapper: str) -> None:
    world = {"class": f"{WORLDS}->AsyncCounter", "options": {"log": str(tmp_path / "log"), "size": 2}}
    episode = play(tmp_path, "one", "two", environment=world, wrapper=wrapper)
    assert episode.failure is None and episode.status is EpisodeStatus.COMPLETED
    assert episode.metadata == {"steps": 2, "query": "Count to 2."}
    assert episode.reward == pytest.approx(0.25) and episode.is_success is False  # half of 0.25 + 0.25
    said = [message["content"] for call in episode.tree.calls for message in call.new_messages]
    assert said[0] == "Count to 2." and said[-1] == "1"
    assert events(episode) == ["reset", "step", "step", "evaluate", "close"]
    assert (tmp_path / "log").read_text() == "reset\nclose\n"
    assert decode_episode(encode_episode(episode)).environment == episode.environment


def test_a_success_is_worth_more(tmp_path: Path) -> None:
    episode = play(tmp_path, "go", environment=f"{WORLDS}->Judging", wrapper="asyncio")
    assert episode.reward == 1.5 and episode.is_success


@EVERYWHERE
def test_an_error_in_a_step_ends_its_episode_alone_and_is_recorded(tmp_path: Path, wrapper: str) -> None:
    world = {"class": f"{WORLDS}->Counter", "options": {"log": str(tmp_path / "log")}}
    episode = play(tmp_path, "one", "raise", environment=world, wrapper=wrapper)
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.reward is None
    assert episode.failure is not None and episode.failure.kind == "KeyError"
    assert episode.environment is not None and episode.environment.events[-2].error == "KeyError: 'mine'"
    assert (tmp_path / "log").read_text() == "reset\nclose\n"


def test_a_lie_is_no_reward(tmp_path: Path) -> None:
    episode = play(tmp_path, "nan", environment=f"{WORLDS}->Counter", wrapper="asyncio")
    assert episode.status is EpisodeStatus.WORKFLOW_ERROR and episode.reward is None
    assert episode.failure is not None and "must be a finite number, not nan" in episode.failure.message


@pytest.mark.parametrize(
    ("said", "wrapper"),
    [
        ("nan", "asyncio"),
        ("text", "asyncio"),
        ("list", "asyncio"),
        pytest.param("nan", "multi-processing", id="processes"),
    ],
)
def test_an_invalid_evaluation_is_an_environment_error(tmp_path: Path, said: str, wrapper: str) -> None:
    episode = play(tmp_path, said, environment=f"{WORLDS}->Misjudging", wrapper=wrapper)
    assert episode.status is EpisodeStatus.ENVIRONMENT_ERROR and episode.reward is None
    assert episode.failure is not None and "must be a finite number" in episode.failure.message
    assert episode.ledger.trained == 0


@pytest.mark.slow
@EVERYWHERE
def test_a_step_that_hangs_ends_with_its_episode(tmp_path: Path, wrapper: str) -> None:
    world = {"class": f"{WORLDS}->Counter", "options": {"log": str(tmp_path / "log")}}
    started = time.monotonic()
    episode = play(tmp_path, "one", "hang", environment=world, wrapper=wrapper, episode_timeout=3)
    assert episode.status is EpisodeStatus.TIMEOUT and time.monotonic() - started < 60
    assert events(episode)[:2] == ["reset", "step"]
    if wrapper == "asyncio":  # a killed process takes everything with it
        wait_until(lambda: (tmp_path / "log").read_text() == "reset\nclose\n")


def test_an_environment_that_ends_its_process_is_recorded_up_to_there(tmp_path: Path) -> None:
    episode = play(tmp_path, "one", "exit", environment=f"{WORLDS}->Counter", wrapper="multi-processing")
    assert episode.failure is not None and "exited with code 3" in episode.failure.message
    assert events(episode) == ["reset", "step"]


@pytest.mark.slow
@EVERYWHERE
def test_a_service_that_refuses_costs_its_episode_which_is_run_again(tmp_path: Path, wrapper: str) -> None:
    gone = {"url": "http://127.0.0.1:9", "timeout": 1}
    episode = play(tmp_path, "one", environment=gone, wrapper=wrapper, episode_retries=1)
    assert episode.status is EpisodeStatus.ENVIRONMENT_ERROR and episode.attempts == 2 and episode.reward is None
    assert episode.failure is not None and "environment service http://127.0.0.1:9/create" in episode.failure.message
    assert episode.environment is not None and "refused" in episode.environment.events[0].error
