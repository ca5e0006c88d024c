"""One plan: what `ajet validate` announces is what a run does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ajet.backbone import LaunchOptions, debug, local
from ajet.backbone.plan import RunPlan, needed, serving_engine, training_samples
from ajet.cli.main import main
from ajet.config import BackboneName, Config, load_config, make_config
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.metrics import read_metrics
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks

TALKERS = Path(__file__).parent / "local" / "talkers.py"
IMITATION = "trainer_common.algorithm={policy_loss: sft, sft: {demonstrations: talks.jsonl}}"
SAMPLED = ["rollout.val_kwargs={do_sample: true, temperature: 1.0}", "trainer_common.val_pass_n=2"]


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A YAML for three training tasks, two validation tasks and two recorded conversations."""
    for name, count in (("train", 3), ("val", 2)):
        lines = [json.dumps({"id": f"{name}{index}", "question": f"say {index}"}) for index in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 2)
    yaml = tmp_path / "job.yaml"
    yaml.write_text(f"""
ajet:
  model: {{path: "tiny:qwen2-0.3m"}}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {{training: {{file_path: train.jsonl}}, validation: {{file_path: val.jsonl}}}}
  data: {{train_batch_size: 2, max_prompt_length: 64, max_response_length: 64}}
  rollout:
    user_workflow: {TALKERS}->Babbler
    num_repeat: 2
    max_model_len: 128
    max_response_length_in_one_turn: 4
    compute_madness_checklist: []
  trainer_common: {{total_epochs: 2, test_freq: 2, use_kl_loss: false}}
  debug: {{debug_first_n_tasks: 2}}
""")
    return yaml


def planned(config: Config, backbone: BackboneName) -> RunPlan:
    reader = build_reader(config)
    tasks = training_samples(config, read_training_tasks(reader))
    return RunPlan.of(config, backbone, tasks, len(read_validation_tasks(reader)))


def done(config: Config, folder: Path) -> tuple[Counter[bool], set[int], list[dict[str, Any]]]:
    """A real run: its episodes (validation or not), the steps with a validation, and the metrics of all steps."""
    entry = debug.run if config.ajet.backbone == "debug" else local.run
    with ExperimentFolder.open(config, exp_dir=folder / "runs", source_yaml=config.yaml_path) as experiment:
        assert entry(config, experiment, LaunchOptions(quiet=True)) == 0
        path = experiment.path
    store = EpisodeStore(path / "episodes.sqlite")
    try:
        episodes = list(store.all())
    finally:
        store.close()
    counts = Counter(recorded.validation for recorded in episodes)
    metrics = read_metrics(path / "metrics.jsonl")
    return counts, {step["step"] for step in metrics if "val/return/mean" in step}, metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], ["3 steps", "12 episodes", "2 × 2 episodes"]),
        ([*SAMPLED, "trainer_common.val_before_train=true"], ["3 steps", "12 episodes", "3 × 4 episodes"]),
        (["trainer_common.test_freq=-1", "trainer_common.total_training_steps=1"], ["1 step", "4 episodes"]),
        (["trainer_common.val_only=true"], ["1 × 2 episodes"]),
        ([IMITATION], ["2 steps", "1 × 2 episodes"]),
        (["ajet.backbone=debug"], ["2 episodes, one for each"]),
    ],
    ids=["greedy", "sampled", "one step", "val_only", "imitation", "debug"],
)
def test_validate_announces_what_a_run_does(
    conf: Path, tmp_path: Path, overrides: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(conf, overrides)
    backbone = config.ajet.backbone or "local"
    plan = planned(config, backbone)
    assert main(["validate", str(conf), *overrides]) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in says), said
    episodes, validated, metrics = done(config, tmp_path)
    assert episodes[False] == plan.episodes
    assert episodes[True] == plan.validations * plan.validation_episodes
    assert len(validated) == plan.validations
    if plan.trains:
        assert max(step["step"] for step in metrics) == plan.steps
        assert metrics[-1]["train/epoch"] == pytest.approx(plan.epochs)


def test_a_run_needs_the_packages_of_its_backbone_engine_and_trackers() -> None:
    def names(backbone: BackboneName, **keys: Any) -> list[str]:
        config = make_config({key.replace("__", "."): value for key, value in keys.items()})
        return [package.name for package in needed(config, backbone)]

    assert names("local") == []
    assert names("verl", trainer_common__logger=["wandb", "console"]) == ["verl", "wandb"]
    assert names("trinity", rollout__engine="vllm") == ["trinity-rft"]
    assert names("debug", rollout__engine="vllm") == ["vllm"]
    assert names("debug", rollout__engine="vllm", rollout__vllm__python="/venv/bin/python") == []
    assert names("local", model__lora__enabled=True) == ["peft"]


def test_verl_and_trinity_are_served_by_vllm_unless_told_otherwise() -> None:
    assert serving_engine(make_config(), "local") == "torch"
    assert serving_engine(make_config(), "verl") == serving_engine(make_config(), "trinity") == "vllm"
    assert serving_engine(make_config({"rollout.engine": "sglang"}), "verl") == "sglang"


def test_a_debug_run_takes_its_own_seed_and_engine_size() -> None:
    given = {"rollout.seed": 1, "rollout.tensor_model_parallel_size": 4}
    assert debug.debug_config(make_config(given)).ajet.rollout.seed == 1
    old = make_config({**given, "debug.debug_vllm_seed": 12345, "debug.debug_tensor_parallel_size": 2})
    changed = debug.debug_config(old).ajet.rollout
    assert (changed.seed, changed.tensor_model_parallel_size) == (12345, 2)
    assert (old.ajet.rollout.seed, old.ajet.rollout.tensor_model_parallel_size) == (1, 4)
