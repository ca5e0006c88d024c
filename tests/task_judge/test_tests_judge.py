"""`judge_type: tests`, and judges of one's own that ask for a fresh copy of what an agent left."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.config import make_config
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import JudgeFault
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import load_judge
from support.runner_fakes import played

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

WORKFLOW = """
from ajet import Workflow, WorkflowOutput
from ajet.environment.sandboxes import fresh_copy
from ajet.task_judge.base_judge import BaseJudge

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(messages=[{"role": "user", "content": "?"}])
        await tuner.sandbox.exec(workflow_task.task.metadata["does"])
        return WorkflowOutput()

class Checks(Agent):
    async def execute(self, workflow_task, tuner):
        await super().execute(workflow_task, tuner)
        async with fresh_copy(tuner.sandbox) as copy:
            ran = await copy.exec("python3 n.py")
        return WorkflowOutput(reward=float(ran.stdout == b"2"))

class Prints(BaseJudge):
    async def compute_reward(self, workflow_task, workflow_output):
        async with fresh_copy(workflow_task.sandbox) as copy:
            ran = await copy.exec("python3 n.py; ls ~")
        return float(ran.stdout == b"2")
"""
TESTS = {"test_files": {"t.py": "import n\nassert n.N == 2\n"}, "test_command": "python3 t.py"}
SPOILT = "python3 -c \"import os\nfor i in range(9): os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('x', 'w')\""


def run(tmp_path: Path, does: str, judge: dict[str, Any], wrapper: str = "asyncio", **more: Any) -> Episode:
    (tmp_path / "agent.py").write_text(textwrap.dedent(WORKFLOW))
    settings = {
        "rollout.user_workflow": f"{tmp_path}/agent.py->Agent",
        "rollout.sandbox": {"kind": "bubblewrap", "memory_mb": 64, "disk_mb": 4},
        "task_runner.wrapper_type": wrapper,
        **{f"task_judge.{key}": value for key, value in judge.items()},
        **more,
    }
    return played(settings, ["2"], Task(task_id="t", main_query="?", metadata={**TESTS, "does": does}))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])
def test_the_tests_judge_what_is_in_the_sandbox(tmp_path: Path, wrapper: str) -> None:
    episode = run(tmp_path, "echo N = 2 > n.py; mkfifo t.py", {"judge_type": "tests"}, wrapper)
    assert episode.failure is None, episode.failure
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.COMPLETED, 1.0, True)
    assert episode.metadata["judge"] == {"tests": {"exit_code": 0, "output": "(exit code 0)"}}


def test_as_a_part_of_a_reward(tmp_path: Path) -> None:
    parts = {"tests": {"judge": "tests", "weight": 2.0}}
    episode = run(tmp_path, "echo N = 2 > n.py", {"judge_type": "composite", "parts": parts})
    assert (episode.reward, episode.reward_parts) == (2.0, {"tests": 1.0})


def test_what_cant_be_judged_is_worth_nothing_and_trained(tmp_path: Path) -> None:
    own = {"judge_protocol": f"{tmp_path}/agent.py->Prints"}
    for judge in ({"judge_type": "tests"}, own):
        episode = run(tmp_path, f"echo 'print(2, end=\"\")' > n.py; {SPOILT}", judge)
        assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.COMPLETED, 0.0, False)
        assert episode.tree.trained_tokens == episode.tree.sampled_tokens > 0
        assert "more than 1000 characters" in str(episode.metadata["judge"])
    assert run(tmp_path, "echo 'print(2, end=\"\")' > n.py; touch /tmp/x", own).reward == 1.0


def test_a_workflow_that_meets_it_is_worth_nothing_too(tmp_path: Path) -> None:
    checks = {"rollout.user_workflow": f"{tmp_path}/agent.py->Checks"}
    episode = run(tmp_path, SPOILT, {}, **checks)
    assert (episode.status, episode.reward, episode.is_success) == (EpisodeStatus.COMPLETED, 0.0, False)
    assert episode.tree.trained_tokens == episode.tree.sampled_tokens > 0
    assert "more than 1000 characters" in episode.metadata["unusable_result"]


def test_without_a_sandbox_or_tests_the_judge_is_at_fault() -> None:
    judge = load_judge(make_config({"task_judge.judge_type": "tests"}))
    assert judge is not None
    task = WorkflowTask(task=Task(main_query="?", metadata=TESTS))
    with pytest.raises(JudgeFault, match=r"set ajet\.rollout\.sandbox"):
        asyncio.run(judge.compute_reward(task, WorkflowOutput()))
    untested = WorkflowTask(task=Task(main_query="?"))
    untested.remember_tuner(SimpleNamespace(sandbox=object()))
    with pytest.raises(JudgeFault, match="needs a `test_command`"):
        asyncio.run(judge.compute_reward(untested, WorkflowOutput()))
