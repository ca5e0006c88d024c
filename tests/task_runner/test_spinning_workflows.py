"""Ctrl-C ends a run although its workflows compute and never wait."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.screen import Terminal

PROJECT = """
ajet:
  project_name: screens
  model: {path: "tiny:qwen2-0.3m"}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}}
  data: {max_prompt_length: 128, max_response_length: 128, train_batch_size: 2}
  rollout:
    user_workflow: flow.py->Flow
    num_repeat: 4
    max_model_len: 256
    max_response_length_in_one_turn: 8
    compute_madness_checklist: []
  trainer_common: {total_training_steps: 2, use_kl_loss: false}
"""
WORKFLOW = """
from pathlib import Path
from ajet import Workflow

class Flow(Workflow):
    async def execute(self, workflow_task, tuner):
        Path(f"spins-{workflow_task.episode_uuid}").touch()
        while True:
            pass
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_run_whose_workflows_only_compute(tmp_path: Path) -> None:
    (tmp_path / "project.yaml").write_text(PROJECT, encoding="utf-8")
    (tmp_path / "flow.py").write_text(WORKFLOW, encoding="utf-8")
    tasks = [{"task_id": f"t{index}", "main_query": f"Task {index}"} for index in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks), encoding="utf-8")
    command = [sys.executable, "-m", "ajet", "--conf", "project.yaml"]
    with Terminal(command, columns=100, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}) as shown:
        while len(list(tmp_path.glob("spins-*"))) < 8:
            assert shown.read(), shown.text
        shown.type("\x03")
        shown.finish()
    assert shown.process.returncode == 130
    assert "did not end in time" not in shown.everything and "interrupted" in shown.text
