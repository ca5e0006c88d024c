"""`ajet export`: filters, and where it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ajet.cli.export import run
from ajet.cli.main import main
from support.synthetic_run import write_experiment


def test_export_with_filters(tmp_path: Path, capsys: object) -> None:
    experiment = write_experiment(tmp_path, steps=4, tasks=2)
    target = tmp_path / "out" / "good.jsonl"
    assert (
        run(["episodes", str(experiment), str(target), "--format", "sft", "--reward-min", "1", "--step-max", "2"]) == 0
    )
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert records and all(record["reward"] == 1.0 for record in records)
    everything = tmp_path / "all.jsonl"
    run(["episodes", str(experiment), str(everything)])
    assert {json.loads(line)["step"] for line in everything.read_text().splitlines()} == {1, 2, 3, 4}


def test_a_pipe_or_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """As root, a device would be replaced by a file: `/dev/stdout` for the whole machine."""
    experiment = write_experiment(tmp_path, steps=1, tasks=1, repeats=2)
    command = [sys.executable, "-m", "ajet", "export", "episodes", str(experiment), "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [1, 1]
    assert done.stderr == "2 episodes in /dev/stdout\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([*command[:-1], str(pipe)], stderr=subprocess.DEVNULL):
        assert len(pipe.read_text().splitlines()) == 2
    assert pipe.is_fifo()
    assert main(["export", "episodes", str(experiment), str(pipe), "--format", "parquet"]) == 2


def test_a_link_stays_one_and_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = write_experiment(tmp_path, steps=1, tasks=1, repeats=2)
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    assert main(["export", "episodes", str(experiment), str(link)]) == 0
    assert link.is_symlink() and len(file.read_text().splitlines()) == 2
    assert main(["export", "episodes", str(experiment), str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder: name the file to write" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["file", "run", "run/step_1", "run/hf"])
def test_weights_are_not_written_over_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    weights = tmp_path / "run" / "step_1" / "hf"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (tmp_path / "run" / "hf").symlink_to("step_1/hf")
    (tmp_path / "file").touch()
    assert main(["export", "weights", str(tmp_path / "run"), str(tmp_path / target), "--force"]) == 2
    assert "folder" in capsys.readouterr().err
    assert (weights / "config.json").is_file() and (tmp_path / "run" / "hf").is_symlink()


@pytest.mark.parametrize(
    ("base", "named", "is_public"),
    [("Qwen/Qwen3-4B", "Qwen/Qwen3-4B", True), ("/data/Qwen3-4B", "Qwen3-4B", False), ("a/b/c", "c", False)],
)
def test_the_model_card_names_the_workflow_and_no_folder_of_this_machine(
    tmp_path: Path, base: str, named: str, is_public: bool
) -> None:
    """The exported folder is what one publishes."""
    weights = tmp_path / "run" / "step_1" / "hf"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (tmp_path / "run" / "hf").symlink_to("step_1/hf")
    workflow = f"ajet: {{model: {{path: {base}}}, rollout: {{user_workflow: {tmp_path}/workflow.py->MyWorkflow}}}}\n"
    (tmp_path / "run" / "config.resolved.yaml").write_text(workflow)
    assert main(["export", "weights", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| Workflow | workflow.py->MyWorkflow |" in card and str(tmp_path) not in card
    assert f"| Base model | {named} |" in card and (f"base_model: {base}\n" in card) is is_public


@pytest.mark.parametrize(("lora", "rate"), [(False, "1e-06"), (True, "1e-05")])
def test_a_checkpoints_card_is_that_of_its_run(tmp_path: Path, lora: bool, rate: str) -> None:
    weights = tmp_path / "run" / "checkpoints" / "step_4" / "hf"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (tmp_path / "run" / "hf").symlink_to("checkpoints/step_4/hf")
    model, common = f"{{path: tiny, lora: {{enabled: {lora}}}}}", "{optim: {lr: null}}"
    (tmp_path / "run" / "config.resolved.yaml").write_text(f"ajet: {{model: {model}, trainer_common: {common}}}\n")
    for named in ("run", "run/checkpoints/step_4", "run/hf"):
        assert main(["export", "weights", str(tmp_path / named), str(tmp_path / "model"), "--force"]) == 0
        card = (tmp_path / "model" / "README.md").read_text()
        assert "\n# run\n" in card and "| Base model | tiny |" in card and f"| Learning rate | {rate} |" in card


def test_a_mounted_folder_is_filled_and_not_removed(tmp_path: Path) -> None:
    weights, mounted = tmp_path / "run" / "hf", tmp_path / "mounted"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (mounted / "old").mkdir(parents=True)
    (mounted / "link").symlink_to(weights)

    held = os.open(mounted, os.O_RDONLY)  # so that no other folder gets its number
    assert main(["export", "weights", str(tmp_path / "run"), str(mounted), "--force"]) == 0
    assert os.path.samestat(mounted.stat(), os.fstat(held))
    os.close(held)
    assert sorted(path.name for path in mounted.iterdir()) == ["README.md", "config.json"]
    assert (weights / "config.json").is_file()
