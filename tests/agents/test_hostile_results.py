"""Whatever an agent does to its result instead of solving the task: its episode is completed, with reward 0, and
trained. Each case is an episode of a coding agent in bubblewrap."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ajet.config import make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import Reply, ScriptedCall, ScriptedEngine
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime
from support import hostile_results

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

INSTALLED = str(Path(pytest.__file__).parents[1])
SCRIPT, PYTEST = "python3 test_calc.py", "python3 -m pytest -q test_calc.py"
DONE: list[str] = []
"""What the agent of the episode under way does: one shell command."""


def reply(call: ScriptedCall) -> Reply:
    if call.index:
        return "Done."
    return {"content": "", "tool_calls": [{"function": {"name": "bash", "arguments": {"command": DONE[-1]}}}]}


@contextlib.contextmanager
def started(exec_seconds: float) -> Iterator[Runtime]:
    sandbox = {
        "kind": "bubblewrap",
        "memory_mb": 256,
        "disk_mb": 16,
        "processes": 64,
        "exec_seconds": exec_seconds,
        "read_only": [INSTALLED],
        "environment": {"PYTHONPATH": INSTALLED, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    }
    agent = {"type": "coding", "tools": ["bash"], "options": {"max_attempts": 1}}
    config = make_config({"rollout.agent": agent, "rollout.sandbox": sandbox})
    engine = ScriptedEngine(reply, lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    with Runtime(config, make_engine=lambda _: engine) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(exec_seconds=60) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def impatient() -> Iterator[Runtime]:
    with started(exec_seconds=5) as runtime:
        yield runtime


def episode_of(runtime: Runtime, command: str, tests: str = SCRIPT) -> Episode:
    task = {
        "files": {"calc.py": hostile_results.BROKEN},
        "test_files": {"test_calc.py": hostile_results.TEST},
        "test_command": tests,
    }
    DONE.append(command)
    return runtime.run(runtime.pool.run_episode(Task(task_id="t", main_query="Repair calc.py.", metadata=task)))


def check_worthless(episode: Episode) -> None:
    assert episode.failure is None, episode.failure
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.COMPLETED, 0.0, False)
    assert episode.tree.trained_tokens == episode.tree.sampled_tokens > 0
    assert episode.metadata["tests"]["exit_code"] or episode.metadata["tests"]["why"]


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile_results.ANY_TESTS)
def test_a_hostile_result_is_worth_nothing(runtime: Runtime, name: str) -> None:
    check_worthless(episode_of(runtime, hostile_results.ANY_TESTS[name]))


@pytest.mark.parametrize("name", hostile_results.PYTEST)
def test_pytest_is_the_tasks_own(runtime: Runtime, name: str) -> None:
    check_worthless(episode_of(runtime, hostile_results.PYTEST[name], PYTEST))


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile_results.SLOW)
def test_what_never_ends_is_worth_nothing(impatient: Runtime, name: str) -> None:
    check_worthless(episode_of(impatient, hostile_results.SLOW[name]))


@pytest.mark.parametrize(
    ("name", "tests"), [*((name, SCRIPT) for name in hostile_results.HONEST), ("solved with helpers", PYTEST)]
)
def test_an_honest_result_is_worth_it(runtime: Runtime, name: str, tests: str) -> None:
    episode = episode_of(runtime, hostile_results.HONEST[name], tests)
    assert episode.failure is None, episode.failure
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.COMPLETED, 1.0, True)
