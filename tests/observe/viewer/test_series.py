"""Metrics as columns: read on as the file grows, in the order of steps, and thinned so that no spike is lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ajet.observe.viewer.series import MetricsReader, Shown, smoothed

LONG = 10_000
SPIKES = {1234: 9.0, 7777: -9.0, 10_000: 5.0}


def write(path: Path, *records: dict[str, object]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> MetricsReader:
    path = tmp_path_factory.mktemp("long") / "metrics.jsonl"
    write(
        path,
        *(
            {"step": step, "loss": SPIKES.get(step, step % 7 / 7), "episode/count": 8}
            | ({"failed": 4} if step == 5000 else {})
            | ({"val": step / LONG} if step % 10 == 0 else {})
            for step in range(1, LONG + 1)
        ),
    )
    return MetricsReader(path)


def test_a_long_run_has_few_points_and_all_its_spikes(long_run: MetricsReader) -> None:
    found = long_run.chart(Shown(("loss", "val")))
    assert found["count"] == LONG and found["width"] == 20 and len(found["steps"]) == 1000
    assert found["steps"] == sorted(set(found["steps"])) and found["steps"][0] == 1 and found["last"] == LONG
    for step, value in SPIKES.items():
        at = found["series"]["loss"].index(value)
        assert abs(found["steps"][at] - step) < found["width"], "a spike stands within its bucket"
    assert found["ends"]["loss"] == [1 / 7, 9.0, 5.0], "first, highest and last of all values"
    validated = [value for value in found["series"]["val"] if value == value]
    assert len(validated) == 1000 and validated[-1] == 1.0


def test_zoomed_in_every_step_is_there(long_run: MetricsReader) -> None:
    found = long_run.chart(Shown(("loss",), first=7700, last=7800))
    assert found["width"] == 1 and found["steps"] == list(range(7700, 7801))
    assert found["series"]["loss"][77] == -9.0 and (found["first"], found["last"]) == (1, LONG)


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 1501, 2001, 9981])
def test_each_point_has_its_place(tmp_path: Path, count: int) -> None:
    write(tmp_path / "metrics.jsonl", *({"step": step, "loss": float(step)} for step in range(count)))
    found = MetricsReader(tmp_path / "metrics.jsonl").chart(Shown(("loss",), stacked=("loss2",)))
    assert len(found["steps"]) == len(found["series"]["loss"]) <= 1000 and len(set(found["steps"])) == len(
        found["steps"]
    )
    assert max(found["series"]["loss"]) == count - 1


def test_stacked_metrics_are_averaged_and_zero_where_a_step_logged_none(long_run: MetricsReader) -> None:
    found = long_run.chart(Shown(stacked=("failed",)))
    values = found["series"]["failed"]
    assert sum(values) == pytest.approx(2 * 4 / 20) and np.count_nonzero(values) == 2
    assert found["ends"]["failed"] == [0.0, 4.0, 0.0]


def test_smoothing_is_that_of_all_steps(long_run: MetricsReader) -> None:
    whole = smoothed(np.array([SPIKES.get(step, step % 7 / 7) for step in range(1, LONG + 1)]), 0.9)
    found = long_run.chart(Shown(("loss",), first=7770, last=7780, smooth=0.9))
    assert found["series"]["loss"] == pytest.approx(whole[7769:7780].tolist())
    assert smoothed(np.array([1.0, np.nan, 3.0]), 0.5).tolist()[::2] == [1.0, pytest.approx(7 / 3)]


def test_what_is_known_is_not_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.chart(Shown(("loss",)))["steps"] == []
    write(path, {"step": 1, "loss": 0.5})
    first = reader.chart(Shown(("loss",)))
    assert reader.chart(Shown(("loss",)), first["stamp"]) == {"stamp": first["stamp"], "unchanged": True}
    write(path, {"step": 2, "loss": 0.25, "new": 1})
    second = reader.chart(Shown(("loss", "new")), first["stamp"])
    assert second["series"]["loss"] == [0.5, 0.25] and np.isnan(second["series"]["new"][0])
    path.write_text('{"step": 9}\n')
    assert reader.columns()["steps"] == [9], "a file that was written anew is read anew"
    path.write_text('{"step": 7}\n{"step": 8}\n')
    assert reader.columns()["steps"] == [7, 8], "also if it is longer, and has the inode of the one before"


def test_steps_without_a_finite_number_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 0.5}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": "inf"}, {"step": 4})
    reader = MetricsReader(path)
    assert reader.chart(Shown(("loss",)))["problem"] == "loss: no finite number at 2 of 4 steps, last at 3"
    assert reader.chart(Shown(("other",)))["problem"] == "" and reader.columns()["problem"] == "", "no damage"
    write(path, {"step": 3, "loss": 0.5}, {"step": 2, "loss": 0.25})
    assert reader.chart(Shown(("loss",)))["problem"] == "", "a later line of a step counts"


def test_a_bare_nan_costs_no_other_metric_of_its_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "kl": -Infinity, "reward": 0.5}\n')
    columns = MetricsReader(tmp_path / "metrics.jsonl").columns()
    assert columns["series"] == {"kl": [None], "loss": [None], "reward": [0.5]} and not columns["problem"]


def test_columns_are_in_the_order_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 3, "a": 3}, {"step": 1, "a": 1}, {"step": 3, "b": "nan"}, {"step": 2, "b": 2.5})
    with path.open("a") as file:
        file.write('{"step": 4, "a": "inf"}\nnonsense\n{"no": "step"}\n{"step": 5, "a": 1')
    reader = MetricsReader(path)
    found = reader.columns()
    assert found["steps"] == [1, 2, 3, 4]
    assert found["series"] == {"a": [1, None, 3, None], "b": [None, 2.5, None, None]}
    assert f"{path}, line 7: not a step's metrics" in found["problem"]
    with path.open("a") as file:
        file.write("0}\n")
    assert reader.columns(["a"])["series"] == {"a": [1, None, 3, None, 10]}
