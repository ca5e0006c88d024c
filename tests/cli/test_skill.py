"""`ajet init --skill`: what it writes, and that each of its commands does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ajet.cli.init import SKILL
from ajet.cli.main import main
from support.pages import ROOT
from support.skill import scripts, written_files


def test_it_is_a_skill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
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
    try:
        code = main(["init", *arguments])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2 and said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.slow
def test_its_commands_in_the_order_of_its_steps(tmp_path: Path) -> None:
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
