"""`ajet compare`: results, different keys, the difference task by task, sweeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ajet.cli.main import main
from support.synthetic_run import write_experiment, write_validations


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("math-agent", 0), ("math-agent-rloo", 1)):
        write_experiment(tmp_path / "saved_experiments", name, steps=6, tasks=2, seed=seed)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


BEFORE: dict[str, list[float | None]] = {"a": [0.0, 0.0], "b": [0.0, 1.0], "c": [1.0, None], "d": [0.0, 0.0]}
AFTER: dict[str, list[float | None]] = {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 1.0], "d": [1.0, 0.0]}


def test_compare_shows_results_and_different_keys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = here / "saved_experiments" / "math-agent-rloo" / "config.resolved.yaml"
    config.write_text(config.read_text().replace("num_repeat: 4", "num_repeat: 9", 1))
    code, out, _ = said(capsys, "compare", "math-agent", "saved_experiments/math-agent-rloo")
    assert code == 0
    assert "return, last step" in out
    code, _, error = said(capsys, "compare", "math-agent", "math-agnt")
    assert code == 2
    assert "did you mean math-agent?" in error and "math-agent-rloo" in error
    assert "task by task" not in out, "these runs have no recorded validation"


def test_compare_warns_of_rewards_by_different_judges(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [here / "saved_experiments" / name / "environment.json" for name in ("math-agent", "math-agent-rloo")]
    known = [json.loads(file.read_text()) for file in files]
    runs = ("compare", "math-agent", "math-agent-rloo")
    for judges, warned in ((("A", "A"), False), (("A", ""), False), (("A", "B (exact rules alone)"), True)):
        for file, before, judge in zip(files, known, judges, strict=True):
            file.write_text(json.dumps(before | {"judge": judge}))
        _, _, error = said(capsys, *runs)
        expected = "can't be compared (math-agent: A; math-agent-rloo: B (exact rules alone))"
        assert ("scored differently" in error) is (expected in error) is warned


def test_a_run_against_its_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_validations(tmp_path, "one", {0: BEFORE, 5: {"a": [0.0]}, 10: AFTER})
    code, out, _ = said(capsys, "compare", str(tmp_path / "one"))
    assert code == 0 and "step 10 against step 0" in out
    # differences 1, 0.5, -0.5, 0.5: the mean, and of 2^4 signs those that lead as far
    row = next(line.split() for line in out.splitlines() if "against" in line)
    assert row[5] == "+0.375" and row[-4:] == ["0.5", "4", "3", "1"]
    assert "worse   1.000 → 0.500  c  What is c?" in out
    assert out.index("better  0.000 → 1.000  a") < out.index("better  0.000 → 0.500  d")
    _, out, _ = said(capsys, "compare", str(tmp_path / "one"), "--json")
    (gain,) = json.loads(out)["gains"]
    assert gain["gain"]["value"] == pytest.approx(0.375) and gain["worse"][0]["task_id"] == "c"


def test_a_run_with_one_validation_has_no_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_validations(tmp_path, "one", {10: AFTER})
    code, _, error = said(capsys, "compare", str(tmp_path / "one"))
    assert code == 2 and "fewer than two recorded validations" in error and "val_before_train" in error


def test_what_failed_or_was_cut_stands_for_no_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_validations(tmp_path, "one", {0: BEFORE, 10: AFTER})
    config = tmp_path / "one" / "config.resolved.yaml"
    config.write_text(config.read_text().replace("keep: all", "keep: failures", 1))
    code, _, error = said(capsys, "compare", str(tmp_path / "one"))
    assert code == 2 and "not with recorder.keep: failures" in error


def test_rounds_of_several_candidates_are_no_validations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_validations(tmp_path, "one", {0: BEFORE, 10: AFTER})
    (tmp_path / "one" / "prompts").mkdir()
    code, out, error = said(capsys, "compare", str(tmp_path / "one"))
    assert code == 2 and "prompts/best.yaml compares the best with the first" in error and not out


def test_two_runs_are_compared_by_their_last_validations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_validations(tmp_path, "one", {0: AFTER, 10: BEFORE})
    write_validations(tmp_path, "two", {0: BEFORE, 10: {**AFTER, "new": [1.0]}}, seed=1)
    write_validations(tmp_path, "other", {10: {"x": [1.0]}}, seed=2)
    code, out, _ = said(capsys, "compare", str(tmp_path / "one"), str(tmp_path / "two"))
    assert code == 0 and "two against one" in out and "+0.375" in out
    assert "1 tasks are not in both two and one" in out and "trainer_common.seed" in out
    code, out, _ = said(capsys, "compare", str(tmp_path / "one"), str(tmp_path / "other"))
    assert code == 0 and "no shared task" in out


def test_a_sweep_is_a_table_with_the_best_run_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, (name, found) in enumerate({"low": BEFORE, "high": AFTER, "none": {"a": [0.0], "b": [0.0]}}.items()):
        write_validations(tmp_path, name, {10: found}, seed=seed)
    runs = [str(tmp_path / name) for name in ("low", "high", "none")]
    code, out, _ = said(capsys, "compare", *runs)
    head, *rows = out.splitlines()
    assert code == 0 and head.split() == ["run", "validation", "return", "gain", "p", "trainer_common.seed"]
    assert [row.split()[0] for row in rows[:3]] == ["high", "low", "none"]
    assert rows[0].split()[3:] == ["+0.375", "0.5", "1"]
    found = json.loads(said(capsys, "compare", *runs, "--json")[1])
    assert [run["config"] for run in found["runs"]] == [{"ajet.trainer_common.seed": str(seed)} for seed in range(3)]


def test_the_only_evaluation_of_a_folder_stands_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, name in (("a", "base-validation"), ("b", "base-validation"), ("b", "tiny-validation")):
        write_validations(tmp_path / folder, name, {0: BEFORE})
        (tmp_path / folder / name / "fingerprint.json").write_text("{}")
    code, out, _ = said(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b" / "tiny-validation"))
    assert code == 0 and "tiny-validation against base-validation" in out
    code, _, error = said(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 2 and "several evaluations" in error and "tiny-validation" in error
