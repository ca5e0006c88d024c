"""verl's own file with every key there is, migrated: what is passed through is verl's, and none of ours is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.backbone.ray.facts import Machine, RunFacts
from ajet.backbone.ray.verl.config import compose_verl_config, pass_through, verl_settings
from ajet.cli.migrate import migrate, read, written
from ajet.config import load_config


def test_verl_s_own_file_is_migrated_and_composed(tmp_path: Path) -> None:
    trainer = pytest.importorskip("verl.trainer")  # this folder, too, can be imported as `verl`
    file = Path(trainer.__file__).parent / "config/_generated_ppo_trainer.yaml"
    done = migrate(read(file), file)
    assert len(done.lines) > 500 and not [line for line in done.lines if line.what == "unknown"]
    (tmp_path / "ours.yaml").write_text(written(done, file))
    (tmp_path / "train.parquet").touch()
    given = {"model.path": "tiny:qwen2", "task_reader.type": "random_dummy", "rollout.num_repeat": 4}
    unread = {"task_reader.huggingface_dat_repo.dataset_path": "null"}
    overrides = [f"{key}={value}" for key, value in (given | unread).items()]
    config = load_config(tmp_path / "ours.yaml", overrides, complete=False)
    facts = RunFacts("tiny:qwen2", tmp_path / "checkpoints", 10, payload="x")
    composed = compose_verl_config(verl_settings(config, facts, Machine("cuda")), given=pass_through(config))
    assert composed.data.train_batch_size == 1024 and composed.trainer.total_training_steps == 10
