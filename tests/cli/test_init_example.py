"""`ajet init NAME --example quickstart`: the demo's job, from a clone and from the wheel alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ajet.cli.main import main

ROOT = Path(__file__).parents[2]


def test_the_example_is_a_project_with_paths_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--example", "quickstart"]) == 0
    assert "ajet --conf quickstart.yaml" in capsys.readouterr().out
    text = (tmp_path / "mine/quickstart.yaml").read_text()
    assert "tutorial" not in text and str(ROOT) not in text
    for name in re.findall(r"(?:path|user_workflow): ([\w./]+)", text):
        assert (tmp_path / "mine" / name).exists(), name
    assert main(["validate", "mine/quickstart.yaml"]) == 0
    assert "1,024 to train on, 128 to validate on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mine", "--example", "nothing"], "invalid choice: 'nothing'"),
        (["mine", "--example", "quickstart", "--agent", "react"], "not allowed with argument"),
        (["full", "--example", "quickstart"], "already exists"),
    ],
)
def test_what_a_user_gets_wrong(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    assert main(["init", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "mine").exists() and len(list((tmp_path / "full").iterdir())) == 1


@pytest.mark.slow
def test_the_wheel_alone_trains_the_example(tmp_path: Path) -> None:
    """The packages that it needs are those of the tests; of ajet there is what the wheel holds."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "package")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "package")}

    def ajet(folder: Path, *arguments: str) -> str:
        command = [sys.executable, "-m", "ajet", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ajet(tmp_path, "init", "mine", "--example", "quickstart")
    folder = tmp_path / "mine"
    few = (
        "trainer_common.total_training_steps=2",
        "trainer_common.test_freq=1",
        "trainer_common.val_before_train=false",
    )
    assert "validation" in ajet(folder, "--conf", "quickstart.yaml", *few)
    assert (folder / "saved_experiments/quickstart").is_dir()
