"""`ajet init`: what is refused; `--example`, from a clone and from the wheel alone; `--skill`, and that each of its
commands does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from ajet.cli.init import SKILL
from ajet.cli.main import main
from support.pages import ROOT
from support.skill import scripts, written_files


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(([name], "can't be a project's name") for name in ("1st", "a b", "x.y", "-")),
        (["full"], "full already exists"),
        (["mine", "--example", "nothing"], "invalid choice: 'nothing'"),
        (["mine", "--example", "quickstart", "--agent", "react"], "not allowed with argument"),
        (["full", "--example", "quickstart"], "already exists"),
        (["--skill", "full"], "full already exists"),
        (["mine", "--skill"], "--skill takes one folder"),
        (["--skill", "a", "--agent", "react"], "not allowed with argument"),
        ([], "NAME is missing"),
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
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["full", "full/mine.txt"]


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


def test_a_skill_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--skill"]) == 0
    folder = tmp_path / ".claude/skills/agentjet"
    text = (folder / "SKILL.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["name"] == folder.name and 100 < len(head["description"]) < 1024
    assert set(re.findall(r"\]\((references/\w+\.md)\)", text)) == {
        str(file.relative_to(folder)) for file in (folder / "references").iterdir()
    }
    assert ".agents/skills/agentjet" in capsys.readouterr().out
    words = sum(len(file.read_text().split()) for file in folder.rglob("*.md"))
    assert words < 1500, "an agent reads all of it"


@pytest.mark.slow
def test_the_skills_commands_in_the_order_of_its_steps(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = tmp_path
    printed = ""
    for script in scripts(SKILL):
        text = f'set -e\najet() {{ "{sys.executable}" -m ajet "$@"; }}\n{script}\npwd > {tmp_path}/.where'
        ran = subprocess.run(
            ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{ran.stderr}"
        folder = Path((tmp_path / ".where").read_text().strip())
        if script.startswith("ajet init"):
            for name, code in written_files(SKILL).items():
                (folder / name).write_text(code)
        printed += ran.stdout
    assert "completed · reward 1 ·" in printed and "2 episodes, 0 without a reward" in printed
    before = json.loads((folder / "before.json").read_text())
    assert before["val/failed_share"] == 0 and before["val/reward/std"] > 0 and "val/success/pass@4" in before
    last = json.loads((folder / "saved_experiments/my-agent/metrics.jsonl").read_text().splitlines()[-1])
    table = re.findall(r"^\| `(\S+)`", (SKILL / "references/read.md").read_text(), re.MULTILINE)
    named = {name for row in table for name in [row]} - {"train/kl"}  # without a reference, there is none
    assert last["step"] == 20 and named <= set(last), named - set(last)
    assert (tmp_path / "my-model/model.safetensors").is_file()
