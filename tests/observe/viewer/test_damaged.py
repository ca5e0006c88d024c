"""An experiment folder with a damaged file says so, and takes nothing from the others."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.cli.runs import run as runs
from ajet.observe.viewer.library import Experiment
from ajet.schema.errors import UserError
from support.pages_of_viewer import signed_in


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def folder_for_file(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def cut_database(folder: Path) -> None:
    with sqlite3.connect(folder / "episodes.sqlite") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file = folder / "episodes.sqlite"
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    file.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "yaml": (overwrite("config.resolved.yaml", "ajet: [unclosed"), "config.resolved.yaml:2: not YAML"),
    "shape": (overwrite("config.resolved.yaml", "ajet: {model: [1], trainer_common: 3}"), ""),
    "metrics": (overwrite("metrics.jsonl", '{"step": 1, "loss": 0.5}\ngarb\x00age\n[3]\n'), "metrics.jsonl, line 3"),
    "events": (overwrite("events.jsonl", '{"time": 1, "event": "started"}\n{{{\n'), "events.jsonl, line 2: not"),
    "no database": (overwrite("episodes.sqlite", "not a database " * 80), "episodes.sqlite: file is not"),
    "cut database": (cut_database, "malformed"),
    "a folder": (folder_for_file("metrics.jsonl"), "metrics.jsonl"),
    "notes": (overwrite("notes.json", "{"), "notes.json"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGES)
def test_the_others_are_still_listed(
    experiments: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("math-agent", "math-agent-rloo"):
        shutil.copytree(experiments / name, tmp_path / name)
    damage, reason = DAMAGES[kind]
    damage(tmp_path / "math-agent")
    visitor = signed_in(tmp_path)
    rows = {row["name"]: row for row in visitor.get("/api/experiments").json()}
    assert set(rows) == {"math-agent", "math-agent-rloo"}
    whole = rows["math-agent-rloo"]
    assert not whole["problem"] and whole["episodes"] and whole["step"] == 12
    assert reason in rows["math-agent"]["problem"] and bool(reason) == bool(rows["math-agent"]["problem"])
    for path in ("/x/math-agent", "/x/math-agent/episodes", "/x/math-agent/tasks", "/x/math-agent/about"):
        answer = visitor.get(path)
        assert answer.status_code == 200 or reason.split(":")[0].split(" is")[0] in answer.text, path
    assert runs([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "math-agent-rloo" in said.out and (not reason or reason in said.err)


def test_rewards_of_the_others_are_still_compared(experiments: Path, tmp_path: Path) -> None:
    for name in ("math-agent", "math-agent-rloo"):
        shutil.copytree(experiments / name, tmp_path / name)
    visitor = signed_in(tmp_path)
    both = visitor.get("/api/rewards?runs=math-agent,math-agent-rloo").json()
    bins = {name: run["bins"] for name, run in both["runs"].items()}
    assert bins["math-agent"] == bins["math-agent-rloo"] and not both["problems"]
    overwrite("episodes.sqlite", "not a database " * 80)(tmp_path / "math-agent")
    found = signed_in(tmp_path).get("/api/rewards?runs=math-agent,math-agent-rloo").json()
    assert found["runs"]["math-agent"]["steps"] == [] and found["runs"]["math-agent-rloo"]["steps"]
    assert len(found["problems"]) == 1 and "math-agent/episodes.sqlite" in found["problems"][0]
    assert visitor.get("/api/rewards?runs=nobody").status_code == 404


def test_what_can_be_read_is_shown(experiments: Path, tmp_path: Path) -> None:
    shutil.copytree(experiments / "math-agent", tmp_path / "math-agent")
    with (tmp_path / "math-agent" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "reward/me\n{"step": 22, "reward/mean": 0.5}\n')
    columns = signed_in(tmp_path).get("/api/x/math-agent/metrics").json()
    assert columns["steps"][-1] == 22 and "metrics.jsonl, line 21" in columns["problem"]


def test_a_damaged_episode_fails_alone(experiments: Path, tmp_path: Path) -> None:
    shutil.copytree(experiments / "math-agent", tmp_path / "math-agent")
    with sqlite3.connect(tmp_path / "math-agent" / "episodes.sqlite") as connection:
        (first,) = connection.execute("SELECT episode_id FROM episode WHERE id = 1").fetchone()
        (second,) = connection.execute("SELECT episode_id FROM episode WHERE id = 2").fetchone()
        connection.execute("UPDATE body SET data = x'00ff' WHERE id = 1")
        others = "WHERE task_id NOT IN (SELECT task_id FROM episode WHERE id < 3)"
        (task,) = connection.execute(f"SELECT task_id FROM task_record {others}").fetchone()
        connection.execute(f"UPDATE task_record SET data = x'00ff' {others}")
    visitor = signed_in(tmp_path)
    answer = visitor.get(f"/api/x/math-agent/episode/{first}")
    assert answer.status_code == 500 and f"episode '{first}': the episode record is damaged" in answer.json()["error"]
    assert visitor.get(f"/api/x/math-agent/episode/{second}").status_code == 200
    assert "the record of a task is damaged" in visitor.get(f"/api/x/math-agent/task/{task}").json()["error"]


def test_a_file_that_is_damaged_within_is_named(
    experiments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(experiments / "math-agent", folder)
    with sqlite3.connect(folder / "episodes.sqlite") as connection:
        (first,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'body'").fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with (folder / "episodes.sqlite").open("r+b") as file:
        file.seek((first - 1) * 4096)
        file.write(b"\xff" * 4096)
    for command in (["diagnose", str(folder)], ["export", "episodes", str(folder), str(tmp_path / "all.jsonl")]):
        assert main(command) == 2
        assert capsys.readouterr().err.startswith(f"error: {folder}/episodes.sqlite: database disk image is malformed")
    assert signed_in(tmp_path).get("/api/x/run/episodes").status_code == 200


def test_values_of_another_kind_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("good", "odd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "return/mean": 0.5}\n')
    folder = tmp_path / "odd"
    (folder / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": {10**30}}}\n{{"step": true}}\n')
    (folder / "events.jsonl").write_text('{"time": 1, "event": "started", "backbone": ["x"]}\n')
    algorithm = "trainer_common: {algorithm: {adv_estimator: {a: 1}}}"
    (folder / "config.resolved.yaml").write_text(f"ajet: {{model: {{path: [1]}}, {algorithm}}}\n")
    assert runs([str(tmp_path)]) == 0
    assert "good" in capsys.readouterr().out
    row = Experiment(folder).summary()
    assert (row["model"], row["backbone"], row["algorithm"], row["step"]) == ("", "", "", 1)
    assert signed_in(tmp_path).get("/api/x/odd/overview").status_code == 200


def test_a_link_costs_the_page_about_a_run_no_more_than_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "config.resolved.yaml").write_text("ajet: {experiment_name: shown}\n")
    (tmp_path / "elsewhere").write_text("secret")
    (folder / "config.yaml").symlink_to(tmp_path / "elsewhere")
    page = signed_in(tmp_path).get("/x/run/about")
    assert page.status_code == 200 and "experiment_name: shown" in page.text
    assert "config.yaml can&#39;t be read" in page.text and "secret" not in page.text.replace("secrets masked", "")


def test_what_is_nested_too_deeply_is_named_and_left_out(tmp_path: Path) -> None:
    deep = f'{{"step": 1, "a": {"[" * 100_000}}}\n'
    for name in ("metrics.jsonl", "events.jsonl", "run.log", "notes.json", "environment.json"):
        (tmp_path / name).write_text(deep)
    (tmp_path / "config.resolved.yaml").write_text("[" * 3000)
    experiment = Experiment(tmp_path)
    problem = experiment.summary()["problem"]
    assert all(name in problem for name in ("metrics.jsonl", "events.jsonl", "notes.json", "config.resolved.yaml"))
    assert experiment.log_tail()[0]["level"] == "damaged"
    with pytest.raises(UserError, match=r"environment\.json is not JSON"):
        experiment.environment()


def test_compared_runs_are_shown_without_what_cannot_be_read(experiments: Path, tmp_path: Path) -> None:
    for name in ("math-agent", "math-agent-rloo"):
        shutil.copytree(experiments / name, tmp_path / name)
    compared = "/compare?runs=math-agent,math-agent-rloo"
    assert "1 configuration key differs" in signed_in(tmp_path).get(compared).text
    overwrite("config.resolved.yaml", "ajet: [unclosed")(tmp_path / "math-agent")
    overwrite("environment.json", "{")(tmp_path / "math-agent-rloo")
    answer = signed_in(tmp_path).get(compared)
    assert answer.status_code == 200 and 'data-runs="math-agent,math-agent-rloo"' in answer.text
    assert answer.text.count("config.resolved.yaml:2: not YAML") == 1 and "environment.json is not JSON" in answer.text
    assert "onfiguration" not in answer.text.replace("config.resolved.yaml", ""), "it isn't known what differs"


def test_a_config_of_another_shape_costs_no_tasks(experiments: Path, tmp_path: Path) -> None:
    shutil.copytree(experiments / "math-agent", tmp_path / "math-agent")
    overwrite("config.resolved.yaml", "ajet: 3")(tmp_path / "math-agent")
    assert signed_in(tmp_path).get("/api/x/math-agent/tasks").json()["total"] == 60
