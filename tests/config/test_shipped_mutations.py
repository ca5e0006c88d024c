"""The shipped YAMLs with random mistakes: `ajet validate` accepts them, or says where the mistake is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from support.shipped_mutations import judged, shipped

SEEDS = range(4)
FILES = 40


def test_there_are_enough_files_to_spoil() -> None:
    assert len(shipped()) >= 20


@pytest.mark.skipif(find_spec("transformers") is None, reason="what the files name needs the `train` extra")
@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_names_file_and_line_or_key(seed: int, tmp_path: Path) -> None:
    verdicts = list(judged(seed, FILES, tmp_path))
    assert [verdict for verdict in verdicts if not verdict.good] == []
    refused = sum(verdict.code == 2 for verdict in verdicts)
    assert refused > FILES / 2
