"""A model of the Qwen3.5 kind is served by the embedded engine and trained, on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.engine.tiny_models import write_tokenizer
from support.asks_twice import AGENTS
from support.hybrids import hybrid_model

CONF = """\
ajet:
  experiment_name: hybrid
  experiment_dir: runs
  model: {path: hybrid}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}}
  rollout: {user_workflow: "agents.py->Agent", num_repeat: 4, max_model_len: 512, max_response_length_in_one_turn: 12}
  data: {train_batch_size: 2, max_prompt_length: 300, max_response_length: 200}
  trainer_common: {total_training_steps: 2}
"""


@pytest.mark.slow
def test_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hybrid_model("Qwen3.5").save_pretrained("hybrid")
    write_tokenizer(tmp_path / "hybrid", "qwen2")
    (tmp_path / "c.yaml").write_text(CONF)
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text('{"query": "a", "answer": "1"}\n{"query": "b", "answer": "2"}\n')
    assert main(["--conf", "c.yaml", "--backbone=local"]) == 0
    (found,) = tmp_path.glob("runs/**/metrics.jsonl")
    steps = [row for row in map(json.loads, found.read_text().splitlines()) if "train/updates" in row]
    assert len(steps) == 2 and steps[0]["train/updates"] == 1
