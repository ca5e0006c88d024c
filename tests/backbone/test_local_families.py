"""Models of other kinds are served and trained on one machine, through gateway, tracker and episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ajet.cli.main import main
from ajet.engine.tiny_models import write_tokenizer
from support.asks_twice import AGENTS
from support.hybrids import hybrid_model
from support.small_models import small_model
from support.torch_vllm_server import vllm_python

CONF = """\
ajet:
  experiment_name: job
  experiment_dir: runs
  model: {path: model}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}}
  rollout:
    user_workflow: agents.py->Agent
    num_repeat: 4
    max_model_len: 512
    max_response_length_in_one_turn: 12
    compute_madness_checklist: []
  data: {train_batch_size: 2, max_prompt_length: 300, max_response_length: 200}
  trainer_common: {total_training_steps: 2}
"""


REPLAY = "rollout.routing_replay=true"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without its model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONF)
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text('{"query": "a", "answer": "1"}\n{"query": "b", "answer": "2"}\n')
    return tmp_path


@pytest.fixture
def mixture(here: Path) -> Path:
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "pad_token_id": 0}
    layers = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    small_model("qwen3_moe", vocab_size=512, **options, **layers).save_pretrained("model")
    write_tokenizer(here / "model", "qwen2")
    return here


def trained_steps(folder: Path, metric: str, *more: str) -> list[dict[str, Any]]:
    assert main(["--conf", "c.yaml", "--backbone=local", *more]) == 0
    (found,) = folder.glob("runs/**/metrics.jsonl")
    return [row for row in map(json.loads, found.read_text().splitlines()) if metric in row]


@pytest.mark.slow
def test_a_hybrid_is_trained(here: Path) -> None:
    hybrid_model("Qwen3.5").save_pretrained("model")
    write_tokenizer(here / "model", "qwen2")
    steps = trained_steps(here, "train/updates")
    assert len(steps) == 2 and steps[0]["train/updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_every_token_goes_where_it_went_when_it_was_sampled(mixture: Path, engine: str) -> None:
    """In vLLM's place stands `torch_vllm_server.py`, which notes experts as vLLM does; vLLM's CPU build can't."""
    python = f"rollout.vllm.python={vllm_python(mixture)}"
    steps = trained_steps(mixture, "tokens/computed", REPLAY, f"rollout.engine={engine}", python)
    assert len(steps) == 2
    for step in steps:
        assert step["tokens/routed_as_sampled"] == step["tokens/computed"]
        assert step["loss/sampler_gap_max"] < 1e-3


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["rollout.engine=remote"], "only the embedded engine and vLLM say which experts they chose"),
        (["backbone=verl"], "verl follows recorded routes only with Megatron and VeOmni"),
        (["trainer_common.compile=true"], "compiled layers choose their experts themselves"),
        (["model.path=tiny:qwen3"], "ajet.rollout.routing_replay: Qwen3ForCausalLM has no router"),
    ],
)
def test_what_can_not_follow_is_refused_by_name(
    mixture: Path, overrides: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "c.yaml", REPLAY, *overrides]) == 2
    assert why in capsys.readouterr().err
