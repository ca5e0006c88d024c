"""200 broken files: each one refused fast, in one message that names place, key and way out, and nothing is run."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.config import load_config

sys.path.insert(0, str(Path(__file__).parent))
from mutations import VALID, Mutation, lay_out, mutations

ALL = mutations()
SECONDS = 1.0


def test_there_are_enough_of_them() -> None:
    assert len(ALL) >= 200
    assert len({mutation.content for mutation in ALL}) == len(ALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AJET_STATE_DIR", str(tmp_path / "state"))
    lay_out(tmp_path)
    return tmp_path


def test_the_unbroken_file_loads(folder: Path) -> None:
    (folder / "valid.yaml").write_text(VALID)
    assert load_config("valid.yaml").frozen_lake.size == 4
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: re.sub(r"\W+", "-", mutation.name)[:60])
def test_a_broken_file_is_refused(mutation: Mutation, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.yaml").write_bytes(mutation.content)
    before = time.process_time()
    code = main(["--conf", "broken.yaml"])
    seconds = time.process_time() - before
    said = capsys.readouterr()
    assert code == 2
    assert said.err.startswith("error: ")
    for text in mutation.names:
        assert text in said.err, said.err
    assert "Traceback" not in said.err
    assert len(said.err) < 4000
    assert said.out == ""
    assert seconds < SECONDS
    assert not (folder / "canary").exists()
    assert not (folder / "saved_experiments").exists()
