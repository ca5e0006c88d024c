"""Models that commands name: by folder, by YAML file, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.cli.targets import opened_experiment, target_config, weights_folder, weights_of
from ajet.observe.viewer import ExperimentNotFoundError
from ajet.schema.errors import ConfigError
from ajet.trainer.checkpoint import CheckpointError, CheckpointFolder


def test_a_name_that_is_neither_run_nor_model_is_refused_with_the_runs_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "saved_experiments" / "maths"
    run.mkdir(parents=True)
    (run / "config.resolved.yaml").write_text("ajet: {}\n")
    (run / "state.json").write_text("{}")
    with pytest.raises(ExperimentNotFoundError, match=r"math: no such run\n.*did you mean maths\? .*: maths"):
        target_config("math")
    assert weights_of("nobody/nothing") == "nobody/nothing"
    (tmp_path / "maths").mkdir()  # a project's folder, perhaps
    with pytest.raises(ExperimentNotFoundError, match=r"\./maths is something else: write saved_experiments/maths\n"):
        opened_experiment(Path("maths"))


def test_a_damaged_config_of_a_run_is_named_before_its_weights_are_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = tmp_path / "run", tmp_path / "model"
    (run / "hf").mkdir(parents=True)
    (run / "hf" / "config.json").write_text("{}")
    (run / "config.resolved.yaml").write_text("ajet: {rollout: [\0")
    target.mkdir()
    (target / "kept").touch()
    for command in (["chat", str(run)], ["export", "weights", str(run), str(target), "--force"]):
        assert main(command) == 2
        assert capsys.readouterr().err.startswith(f"error: {run}/config.resolved.yaml:1: ")
    assert [file.name for file in target.iterdir()] == ["kept"]


def test_the_best_checkpoint_is_checked_before_it_is_used(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")

    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    for step, score in ((1, 0.9), (2, 0.1)):
        checkpoints.save(step, {"score": score}, fill)
    assert weights_folder(tmp_path, best=True) == tmp_path / "checkpoints" / "step_1" / "hf"
    (tmp_path / "checkpoints" / "step_1" / "hf" / "config.json").write_text("")
    with pytest.raises(CheckpointError, match="step_1 is damaged"):
        weights_folder(tmp_path, best=True)


def test_a_folder_must_exist_and_hold_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        weights_folder(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint with a validation"):
        weights_folder(tmp_path, best=True)
    for find in (weights_folder, lambda folder: weights_of(str(folder))):
        with pytest.raises(ConfigError, match="no weights"):
            find(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert weights_folder(tmp_path) == Path(weights_of(str(tmp_path))) == tmp_path / "hf"
    assert weights_folder(tmp_path / "hf") == tmp_path / "hf"


def test_overrides_need_a_yaml_file() -> None:
    assert target_config("tiny:qwen2").ajet.model.path == "tiny:qwen2"
    with pytest.raises(ConfigError, match="need a YAML file"):
        target_config("tiny:qwen2", ["ajet.rollout.temperature=0"])
