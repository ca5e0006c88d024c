"""Broken files: each one refused fast, in one message that names place, key and way out, and nothing is run. 200 are
made by hand; others are a valid file, and the YAMLs that ship, with random mistakes."""

from __future__ import annotations

import random
import re
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.config import load_config
from ajet.schema.errors import UserError
from support.mutations import VALID, Mutation, lay_out, mutations
from support.shipped_mutations import judged, shipped

NOISE = ("${", "}", "&a ", "*a", "!!", "[", "{", ":", "- ", "\t", "#", "'", "|", "<<: ", "---\n", "\0", "???", "${.}")
ALL = mutations()
SHIPPED_FILES = 20
SECONDS = 5.0  # a slow machine under load; how fast it is, `benchmarks/config_errors.py` measures


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


@pytest.mark.slow
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


def spoilt(draw: random.Random) -> str:
    """The valid file with a few random edits."""
    text = VALID
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text))
        lines = text.split("\n")
        one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        match draw.randrange(4):
            case 0:
                text = text[:at] + draw.choice(NOISE) + text[at:]
            case 1:
                text = text[:at] + text[at + draw.randint(1, 20) :]
            case 2:
                lines[one], lines[other] = lines[other], lines[one]
                text = "\n".join(lines)
            case 3:
                lines[one] = " " * draw.randint(0, 9) + lines[one].strip()
                text = "\n".join(lines)
    return text


@pytest.mark.parametrize("seed", range(5))
def test_random_edits_load_or_are_refused_with_a_place(seed: int, folder: Path) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        (folder / "spoilt.yaml").write_text(spoilt(draw))
        try:
            load_config("spoilt.yaml")
        except UserError as error:
            assert str(error).startswith("spoilt.yaml:")
    assert not (folder / "canary").exists()


def test_there_are_enough_shipped_files_to_spoil() -> None:
    assert len(shipped()) >= 20


@pytest.mark.skipif(find_spec("transformers") is None, reason="what the files name needs the `train` extra")
@pytest.mark.parametrize("seed", range(4))
def test_every_message_about_a_shipped_file_names_file_and_line_or_key(seed: int, tmp_path: Path) -> None:
    verdicts = list(judged(seed, SHIPPED_FILES, tmp_path))
    assert [verdict for verdict in verdicts if not verdict.good] == []
    refused = sum(verdict.code == 2 for verdict in verdicts)
    assert refused > SHIPPED_FILES / 2
