"""The matrix of `ajet bench`, its records and its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ajet.observe.board import (
    RunEnd,
    board_html,
    is_done,
    make_record,
    outside_band,
    read_record,
    state_of,
    write_page,
    write_record,
)
from ajet.observe.board_matrix import MatrixCell, chosen, read_matrix, words
from ajet.schema.errors import ConfigError

ROWS = """
overrides: {trainer_common.save_freq: 0}
rows:
  - name: lake
    title: Frozen <lake>
    conf: lake.yaml
    overrides: {rollout.num_repeat: 8}
    seeds: [1, 2]
    variants:
      grpo: {trainer_common.algorithm.adv_estimator: grpo}
      rloo: {trainer_common.algorithm.adv_estimator: rloo, rollout.num_repeat: 4}
    band: {gain: [0.2, null], val/success: [0.5, 1.0]}
  - name: rooms
    conf: lake.yaml
    backbone: prompt
    cold_start: {conf: first.yaml, overrides: {trainer_common.total_training_steps: 3}}
"""


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    (tmp_path / "lake.yaml").write_text("ajet: {}\n")
    (tmp_path / "first.yaml").write_text("ajet: {}\n")
    (tmp_path / "board.yaml").write_text(ROWS)
    return tmp_path / "board.yaml"


def cells_of(matrix: Path) -> list[MatrixCell]:
    return [cell for row in read_matrix(matrix) for cell in row.cells()]


def test_a_matrix_has_a_cell_for_each_row_variant_and_seed(matrix: Path) -> None:
    cells = cells_of(matrix)
    assert [cell.name for cell in cells] == ["lake-grpo-1", "lake-grpo-2", "lake-rloo-1", "lake-rloo-2", "rooms-1"]
    assert cells[2].overrides() == {
        "trainer_common.save_freq": 0, "rollout.num_repeat": 4, "trainer_common.algorithm.adv_estimator": "rloo",
        "rollout.seed": 1, "trainer_common.seed": 1, "task_reader.seed": 1,
    }  # fmt: skip
    assert cells[2].row.title == "Frozen <lake>, rloo" and cells[4].row.title == "rooms"
    assert cells[4].folder(Path("runs")) == Path("runs/rooms-1-prompt")
    assert len({cell.fingerprint() for cell in cells}) == 5
    assert words({"a": "x y", "b": None, "c": [1]}) == ['a="x y"', "b=null", "c=[1]"]


def test_only_takes_cells_rows_and_patterns(matrix: Path) -> None:
    cells = cells_of(matrix)
    assert [cell.name for cell in chosen(cells, ["rooms", "*-2"])] == ["lake-grpo-2", "lake-rloo-2", "rooms-1"]
    assert chosen(cells, []) == cells
    with pytest.raises(ConfigError, match=r"--only lake-grop: no cell and no row.*\n.*did you mean lake-grpo\?"):
        chosen(cells, ["rooms", "lake-grop"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds: [1, 2]", "seed: [1, 2]", r"board.yaml:8: seed: unknown key of a row\n    did you mean `seeds`\?"),
        ("seeds: [1, 2]", "seeds: 3", r":8: seeds: write different whole numbers"),
        ("seeds: [1, 2]", "seeds: [1, 1]", r":8: seeds: write different"),
        ("conf: lake.yaml\n    over", "conf: lak.yaml\n    over", r":6: conf: there is no file 'lak.yaml'\n    looked"),
        ("title: Frozen <lake>", "title: [x]", r":\d+: title: text is needed"),
        ("name: rooms", "name: Rooms/1", r"name: 'Rooms/1': write small letters"),
        ("name: rooms", "name: lake-rloo", r"two rows are called 'lake-rloo'"),
        ("backbone: prompt", "backbone: promt", r"backbone: 'promt' is unknown"),
        ("gain: [0.2, null]", "gian: [0.2, null]", r"band: gian: unknown figure\n    did you mean `gain`\?"),
        ("gain: [0.2, null]", "gain: 0.2", r"band: gain: write \[lowest, highest\]"),
        ("gain: [0.2, null]", "gain: [true, 1]", r"band: gain: write \[lowest, highest\]"),
        ("overrides: {rollout.num_repeat: 8}", "overrides: 8", r":7: overrides: write `rollout.num_repeat: 8`"),
        ("cold_start: {conf", "cold_start: {config", r"config: unknown key of cold_start"),
        ("rows:", "row:", r"row: unknown key of the matrix\n    did you mean `rows`\?"),
    ],
)
def test_what_is_wrong_with_a_matrix_is_named_with_its_line(matrix: Path, old: str, new: str, said: str) -> None:
    assert old in ROWS
    matrix.write_text(ROWS.replace(old, new, 1))
    with pytest.raises(ConfigError, match=said):
        read_matrix(matrix)


STEPS: list[dict[str, Any]] = [
    {"step": 0, "val/return/mean": 0.1, "val/success": 0.0, "val/episode/sampled_tokens_total": 100},
    {"step": 1, "return/mean": 0.3, "episode/sampled_tokens_total": 50, "loss/sampler_gap_max": 2e-6},
    {"step": 2, "return/mean": 0.4, "val/return/mean": 0.5, "val/success": 0.4, "loss/sampler_gap_max": 1e-6},
    {"step": 4, "return/mean": "nan", "val/return/mean": 0.45, "val/success": 0.75, "loss/sampler_kl": 3e-8},
]
GOOD = RunEnd(0, 12.34, 10.0, 512.4)


def ended(cell: MatrixCell, folder: Path, end: RunEnd = GOOD, **changes: float) -> dict[str, Any]:
    """The record of a run that left these metrics."""
    experiment = folder / cell.name
    experiment.mkdir(exist_ok=True)
    steps = [*STEPS[:-1], {**STEPS[-1], **changes}]
    (experiment / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (experiment / "environment.json").write_text(
        json.dumps({"Python": "3.11.7, /somewhere/venv", "torch": "2.9", "commit of ajet": "abc", "command": "/x/ajet"})
    )
    return make_record(cell, experiment, end, read_record(folder / "records", cell))


def test_a_record_holds_figures_curve_and_versions_and_no_path(matrix: Path) -> None:
    cell = cells_of(matrix)[0]
    record = ended(cell, matrix.parent)
    assert record["figures"] == {
        "start": 0.1, "end": 0.45, "gain": 0.35, "steps_to_80": 2, "steps": 4, "tokens": 150, "seconds": 12.3,
        "cpu_seconds": 10.0, "memory_mib": 512, "sampler_gap": 2e-6, "sampler_kl": 3e-8,
    }  # fmt: skip
    assert record["curve"] == {"validation": [[0, 0.1], [2, 0.5], [4, 0.45]], "training": [[1, 0.3], [2, 0.4]]}
    assert record["last"] == {"val/success": 0.75} and record["versions"] == {"python": "3.11.7", "torch": "2.9"}
    assert "/somewhere" not in json.dumps(record) and str(matrix.parent) not in json.dumps(record)
    assert outside_band(cell, record) == []


def test_what_is_outside_its_band_is_named_with_figure_and_band(matrix: Path) -> None:
    cell = cells_of(matrix)[0]
    low = ended(cell, matrix.parent, **{"val/return/mean": 0.15, "val/success": 0.2})
    assert outside_band(cell, low) == [
        "lake-grpo-1: gain is 0.05, and its band is 0.2 to …",
        "lake-grpo-1: val/success is 0.2, and its band is 0.5 to 1",
    ]
    failed = ended(cell, matrix.parent, GOOD._replace(exit_code=1, error=f"{matrix.parent}/boom"))
    assert outside_band(cell, failed) == ["lake-grpo-1: failed (1): boom"]  # no path of this machine
    assert outside_band(cell, None) == ["lake-grpo-1: has no record"]
    del low["figures"]["gain"]
    assert "gain was not recorded" in outside_band(cell, low)[0]


def test_a_cell_is_done_until_its_settings_change_or_it_fails(matrix: Path) -> None:
    cell, records = cells_of(matrix)[0], matrix.parent / "records"
    assert read_record(records, cell) is None and state_of(None, cell) == "to run"
    write_record(records, ended(cell, matrix.parent))
    assert is_done(read_record(records, cell), cell)
    matrix.write_text(ROWS.replace("num_repeat: 8", "num_repeat: 16"))
    changed = cells_of(matrix)[0]
    assert state_of(read_record(records, changed), changed) == "changed: to run again"
    (matrix.parent / "lake.yaml").write_text("ajet: {project_name: x}\n")
    assert not is_done(read_record(records, cell), cell)
    write_record(records, ended(cell, matrix.parent, GOOD._replace(exit_code=-9, error="killed")))
    assert state_of(read_record(records, cell), cell) == "failed: to run again"
    (records / f"{cell.name}.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lake-grpo-1.json is not the record of a cell\n    remove it"):
        read_record(records, cell)


def test_a_record_keeps_the_figures_of_the_last_good_one(matrix: Path) -> None:
    cell, records = cells_of(matrix)[0], matrix.parent / "records"
    write_record(records, ended(cell, matrix.parent))
    write_record(records, ended(cell, matrix.parent, GOOD._replace(exit_code=1, error="boom")))
    again = ended(cell, matrix.parent, **{"val/return/mean": 0.55})
    assert again["previous"]["figures"]["end"] == 0.45 and again["figures"]["end"] == 0.55


def test_the_page_shows_every_row_its_seeds_what_changed_and_what_failed(matrix: Path, tmp_path: Path) -> None:
    rows, records = read_matrix(matrix), tmp_path / "records"
    one, two, failed, *_ = cells_of(matrix)
    write_record(records, ended(one, tmp_path))
    write_record(records, ended(one, tmp_path, **{"val/return/mean": 0.65}))
    write_record(records, ended(two, tmp_path))
    write_record(records, ended(failed, tmp_path, GOOD._replace(exit_code=1, error="<no> memory")))
    html = board_html(rows, records)
    assert "\n\n" not in html and html.count("<section>") == 3
    assert html.count('<polygon class="seeds"') == 1  # two seeds
    assert "Frozen &lt;lake&gt;, grpo" in html and "<td>0.550</td><td>0.450 … 0.650</td><td>+0.100</td>" in html
    assert "lake-rloo-1: failed (1): &lt;no&gt; memory" in html and "rooms-1: has no record" in html
    page = write_page(rows, records, tmp_path / "page").read_text()
    assert "viewport" in page and not re.search(r"<(script|img|iframe|link)\b|https?:", page)
