"""The difference of runs task by task, as the compare page shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.observe.viewer import Experiment, run_gains
from support.pages_of_viewer import signed_in
from support.synthetic_run import write_validations


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_validations(tmp_path, "one", {0: {"a": [0.0], "b": [0.0], "<i>c": [1.0]}})
    write_validations(tmp_path, "two", {0: {"a": [0.0]}, 4: {"a": [1.0], "b": [1.0], "<i>c": [1.0], "d": [0.0]}})
    write_validations(tmp_path, "three", {4: {"x": [1.0]}})
    return tmp_path


def test_each_run_is_compared_with_the_first(runs: Path) -> None:
    two, three = run_gains([Experiment(runs / name) for name in ("one", "two", "three")])
    assert two.gain is not None and two.gain.value == pytest.approx(2 / 3) and two.gain.unshared == 1
    assert [task.task_id for task in two.better] == ["b", "a"] and two.worse == []
    assert (three.name, three.against, three.gain) == ("three", "one", None)
    assert run_gains([]) == run_gains([Experiment(runs / "one")]) == []


def test_of_an_attempt_that_was_played_again_the_newest_counts(tmp_path: Path) -> None:
    write_validations(tmp_path, "one", {0: {"a": [0.0]}})
    write_validations(tmp_path, "two", {0: {"a": [0.0]}})
    write_validations(tmp_path, "two", {0: {"a": [1.0]}}, again="again")
    (found,) = run_gains([Experiment(tmp_path / name) for name in ("one", "two")])
    assert found.gain is not None and found.gain.value == 1


def test_the_page_shows_the_table(runs: Path) -> None:
    page = signed_in(runs).get("/compare?runs=one,two,three").text
    assert "two against one" in page and "+0.667" in page and "(1 not shared)" in page
    assert "no validation task in common" in page
