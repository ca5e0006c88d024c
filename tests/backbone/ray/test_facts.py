"""What every process of a run is told."""

from __future__ import annotations

from pathlib import Path

from ajet.backbone.ray.facts import RunPayload
from ajet.config import make_config


def test_a_run_crosses_processes_unchanged(tmp_path: Path) -> None:
    config = make_config(
        {"rollout.num_repeat": 3, "user": {"text": "${not.an.interpolation}"}}, frozen_lake={"size": 4}
    )
    sent = RunPayload(config.model_dump(mode="json"), str(tmp_path), "/x/y.yaml", "/models/m", total_steps=7)
    got = RunPayload.decode(sent.encode())
    loaded = got.load_config()
    assert got == sent
    assert "$" not in sent.encode()
    assert loaded.ajet.rollout.num_repeat == 3
    assert loaded.frozen_lake.size == 4
    assert loaded.ajet.user.text == "${not.an.interpolation}"
    assert (loaded.ajet.model.path, str(loaded.yaml_path)) == ("/models/m", "/x/y.yaml")
