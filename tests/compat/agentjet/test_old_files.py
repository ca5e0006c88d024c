"""Repositories written for older versions run on debug as they are, with only the model and data paths changed.

Each file here has the shape of one that users bring: its keys, imports and habits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.old_repository import Repository

MATHS = (
    "customized_protocol",
    """
    from loguru import logger
    from ajet.workflow import WorkflowOutput, WorkflowTask
    from ajet import AjetTuner, Workflow

    class OldAgent(Workflow):
        name: str = "old_maths"

        async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
            client = tuner.as_raw_openai_sdk_client()
            reply = await client.chat.completions.create(
                messages=[{"role": "user", "content": workflow_task.task.main_query}]
            )
            return WorkflowOutput(reward=None, metadata={"final_answer": reply.choices[0].message.content})
    """,
)
JUDGE = """
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_rollout.dashscope_llm_bridge import create_external_llm_fn
from ajet.workflow import WorkflowOutput, WorkflowTask

class ByEye(BaseJudge):
    def __init__(self, config):
        self.config = config
        self.ask = create_external_llm_fn(
            alien_llm_model=config.ajet.task_judge.alien_llm_model,
            alien_llm_response_length=config.ajet.task_judge.alien_llm_response_length,
        )

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple:
        right = str(workflow_task.task.metadata["answer"]).split("####")[-1].strip()
        found = right in workflow_output.metadata["final_answer"]
        return (1.0 if found else 0.0), found
"""
GAME = """
import numpy as np
from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet.utils.robust_dashscope import RobustDashScopeChatModel

narrator = RobustDashScopeChatModel("some-helper", stream=False)

class OldAgent(Workflow):
    trainable_targets: list[str] | None = ["wolf"]

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        roles = ["wolf", "villager"]
        np.random.default_rng(int(workflow_task.task.metadata["random_number"])).shuffle(roles)
        assert tuner.trainable_targets == self.trainable_targets
        for role in roles:
            if role in tuner.trainable_targets:
                client = tuner.as_raw_openai_sdk_client(agent_name=f"player_{role}", target_tag=role)
                await client.chat.completions.create(messages=[{"role": "user", "content": f"You are a {role}."}])
            if tuner.context_tracker.context_overflow or tuner.get_context_tracker().context_overflow:
                break
            workflow_task.observation_window["step"][workflow_task.task_thread_index] += 1
        said = await workflow_task.llm_inference_fn([{"role": "user", "content": "again"}], {"max_tokens": 4})
        tokens = len(workflow_task.tokenizer.encode(said["content"] or "-"))
        return WorkflowOutput(reward=1.0, is_success=True, metadata={"tokens": tokens})
"""


@pytest.fixture
def maths(tmp_path: Path) -> Repository:
    agent = MATHS[1].replace("from loguru import logger", "import logging")
    path = tmp_path / "tasks.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"so #### {n + 1}"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    reader = {"type": "dataset_file", "dataset_file": {"training": {"file_path": str(path)}}}
    return Repository(tmp_path, "example_maths", agent, JUDGE, reader)


@pytest.mark.slow
def test_a_maths_agent_with_its_judge(maths: Repository) -> None:
    done = maths.run()
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "old keys that nothing reads" in said
    for key in ("execute_test", "execute_testing_lambda", "ajet_action_when_overflow", "step_skip_action"):
        assert key in said
    assert said.count("old keys that nothing reads") == 1
    assert "swanlab" not in said
    assert "the embedded engine answers in this debug run" in said


@pytest.mark.slow
def test_several_players_and_old_names(tmp_path: Path) -> None:
    game = Repository(tmp_path, "example_game", GAME, None, {"type": "random_dummy"})
    done = game.run()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_training_where_neither_vllm_nor_the_tracker_is_installed(maths: Repository) -> None:
    """What isn't installed is named once, with what to write instead; a missing tracker stops nothing."""
    numbers = ("trainer_common.total_training_steps=2", "data.train_batch_size=2", "rollout.num_repeat=2")
    done = maths.run(*numbers, backbone="local")
    assert done.returncode != 0 and "rollout.engine=torch" in done.stderr and "Traceback" not in done.stderr
    done = maths.run(*numbers, "rollout.name=torch", backbone="local")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'swanlab' is left out" in done.stderr
    assert len((maths.elsewhere / "saved_experiments/example_maths/metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.slow
def test_a_module_of_ours_that_is_gone_is_named_as_ours(maths: Repository) -> None:
    agent = maths.yaml.parent / "agent.py"
    agent.write_text("import ajet.copilot.something\n" + agent.read_text())
    done = maths.run()
    assert done.returncode == 2
    assert "this version has no ajet.copilot" in done.stderr and "ajet.py" not in done.stderr
