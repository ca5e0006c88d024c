"""`ajet export episodes` with filters."""

from __future__ import annotations

import json
from pathlib import Path

from synthetic_run import write_experiment

from ajet.cli.export import run


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
