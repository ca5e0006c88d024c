"""What the pages show as output is what the commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.cli.main import main
from support.pages import ROOT, blocks_of


def shown(page: str, command: str) -> str:
    """The output that a page shows below `$ command`."""
    head = f"$ {command}\n"
    (code,) = [block.code for block in blocks_of(ROOT / "docs" / page) if block.code.startswith(head)]
    return code.removeprefix(head)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my-agent"]) == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path / "my-agent")
    return tmp_path / "my-agent"


def test_migrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(ROOT / "docs/migrate.md")
    (code,) = [block.code for block in blocks if block.code.startswith("model_name_or_path:")]
    Path("grpo.yaml").write_text(code)
    assert main(["migrate", "grpo.yaml", "--out", "math.yaml"]) == 0
    assert capsys.readouterr().err == shown("migrate.md", "ajet migrate grpo.yaml --out math.yaml")


def test_what_is_wrong_with_a_config(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf = project / "my-agent.yaml"
    broken = (
        conf.read_text().replace(" num_repeat: 4 ", " num_repeet: 4 ").replace("train_batch_size: 4", "num_repeat: 4")
    )
    conf.write_text(broken)
    assert main(["--conf", "my-agent.yaml", "rollout.top_p=2"]) == 2
    assert capsys.readouterr().err == shown("commands.md", "ajet --conf my-agent.yaml rollout.top_p=2")


def test_a_bad_line_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ajet.config import make_config
    from ajet.schema.errors import TaskDataError
    from ajet.task_reader import build_reader

    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/train.jsonl").write_text('{"question": "1 + 1?"}\n' * 16 + '{"question": "What is 40 + 2?"; "a": 1}\n')
    reader = build_reader(make_config({"task_reader.jsonl_dataset_file.training.file_path": "data/train.jsonl"}))
    with pytest.raises(TaskDataError) as failed:
        reader.get_training_tasks()
    assert f"error: {failed.value}\n" in [block.code for block in blocks_of(ROOT / "docs" / "tasks.md")]
