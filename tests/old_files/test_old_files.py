"""Repositories written for older versions run on debug as they are, with only the model and data paths changed.

Each file here has the shape of one that users bring: its keys, imports and habits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

SOURCE = Path(__file__).parent.parent.parent
COMMON = """
ajet:
  project_name: example_{name}
  experiment_name: "read_yaml_name"
  task_judge:
    judge_type: customized_protocol
    judge_protocol: {judge}
    alien_llm_model: some-helper
    alien_llm_response_length: 512
  model:
    path: /mnt/data/models/Big-Model-7B
  rollout:
    user_workflow: tutorial.{name}.agent->OldAgent
    force_disable_toolcalls: False
    temperature: 0.7
    max_env_worker: 64
    num_repeat: 6
    agent_madness_reward: 0.0
    agent_madness_termination: True
    compute_madness_checklist: None
    step_skip_action: 0
    ajet_action_when_overflow: truncate
    log_prob_micro_batch_size_per_gpu: 4
    name: vllm
    mode: async
    tensor_model_parallel_size: 1
    n_vllm_engine: 8
    max_num_seqs: 40
    max_response_length_in_one_turn: 16
    max_model_len: 2000
    multi_turn: {{max_steps: 3, expected_steps: 1}}
  data:
    train_batch_size: 32
    max_prompt_length: 1000
    max_response_length: 1000
  debug:
    debug_max_parallel: 1
    debug_first_n_tasks: 2
  context_tracker:
    alien_llm_model: some-helper
    alien_llm_response_length: 512
  trainer_common:
    save_freq: 5
    test_freq: 5
    total_epochs: 99999
    total_training_steps: 25
    nnodes: 2
    n_gpus_per_node: 8
    logger: swanlab
  execute_test: true
  execute_testing_lambda: "tests.bench.some.execute->TestProbe"
  task_reader:
    {reader}
trinity:
  synchronizer: {{sync_interval: 1, sync_offset: 1}}
hydra:
  searchpath: [file://ajet/default_config]
defaults: [verl_default, trinity_default, ajet_default, _self_]
"""
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


class Repository:
    """A folder with `tutorial/<name>/{agent.py, judge.py, <name>.yaml}`."""

    def __init__(self, root: Path, name: str, agent: str, judge: str | None, reader: dict[str, Any]) -> None:
        folder = root / "repository" / "tutorial" / name
        folder.mkdir(parents=True)
        self.yaml = folder / f"{name}.yaml"
        (folder / "agent.py").write_text(textwrap.dedent(agent))
        (folder / "judge.py").write_text(judge or "")
        place = "null" if judge is None else f"tutorial.{name}.judge->ByEye"
        readers = yaml.safe_dump(reader).replace("\n", "\n    ")
        self.yaml.write_text(COMMON.format(name=name, judge=place, reader=readers))
        self.elsewhere = root / "elsewhere"
        self.elsewhere.mkdir()

    def run(self, *overrides: str, backbone: str = "debug") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ajet", "--conf", str(self.yaml), f"--backbone={backbone}"]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
        environment.pop("SWANLAB_API_KEY", None)
        return subprocess.run(
            [*command, "model.path=tiny:qwen2-0.3m", *overrides],
            cwd=self.elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture
def maths(tmp_path: Path) -> Repository:
    agent = MATHS[1].replace("from loguru import logger", "import logging")
    path = tmp_path / "tasks.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"so #### {n + 1}"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    reader = {"type": "dataset_file", "dataset_file": {"training": {"file_path": str(path)}}}
    return Repository(tmp_path, "example_maths", agent, JUDGE, reader)


def test_a_maths_agent_with_its_judge(maths: Repository) -> None:
    done = maths.run()
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "accepted for old files, without effect" in said
    for key in ("execute_test", "execute_testing_lambda", "ajet_action_when_overflow", "step_skip_action"):
        assert key in said
    assert said.count("accepted for old files") == 1
    assert "swanlab" not in said
    assert "the embedded engine answers in this debug run" in said


def test_several_players_and_old_names(tmp_path: Path) -> None:
    game = Repository(tmp_path, "example_game", GAME, None, {"type": "random_dummy"})
    done = game.run()
    assert done.returncode == 0, done.stdout + done.stderr


def test_training_without_its_tracker_ends_before_it_begins_and_says_what_to_do(maths: Repository) -> None:
    done = maths.run("rollout.engine=torch", backbone="local")
    assert done.returncode == 2
    assert "pip install swanlab" in done.stderr and "trainer_common.logger=console" in done.stderr
    assert not (maths.elsewhere / "saved_experiments" / "example_maths").exists()


def test_a_module_of_ours_that_is_gone_is_named_as_ours(maths: Repository) -> None:
    agent = maths.yaml.parent / "agent.py"
    agent.write_text("import ajet.copilot.something\n" + agent.read_text())
    done = maths.run()
    assert done.returncode == 2
    assert "this version has no ajet.copilot" in done.stderr and "ajet.py" not in done.stderr
