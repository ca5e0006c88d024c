"""A run that trained nothing fails, whatever the backbone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ajet.backbone.report import trained_nothing


@pytest.mark.parametrize(
    ("trained", "after", "nothing"),
    [([0, 0], 0, True), ([0, 3], 0, False), ([3, 0], 1, True), ([3], 1, False), ([], 0, False)],
)
def test_only_the_steps_of_this_run_count(tmp_path: Path, trained: list[int], after: int, nothing: bool) -> None:
    lines = [{"step": 0, "time": 0.0, "val/return/mean": 0.5}]
    lines += [{"step": step, "time": 0.0, "credit/episodes_trained": float(n)} for step, n in enumerate(trained, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert trained_nothing(tmp_path, after) is nothing
