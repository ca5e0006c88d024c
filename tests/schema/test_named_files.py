"""Where a name in a YAML is looked up: one order for all kinds of files and folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.config import load_config
from ajet.schema.user_code import find_named, looked_in

YAML = """
ajet:
  model: {path: tiny:qwen2}
  task_reader: {jsonl_dataset_file: {training: {file_path: examples/one/tasks.jsonl}}}
  rollout: {user_workflow: examples/one/agent.py->Agent}
"""


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_working_directory_then_the_yamls_folder_then_those_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, folder = tmp_path / "here", tmp_path / "a" / "b" / "c"
    places = [write(place / "data" / "x.txt") for place in (here, folder, folder.parent, tmp_path)]
    monkeypatch.chdir(here)
    for place in places:
        assert find_named("data/x.txt", [folder]) == place
        assert find_named("data", [folder], Path.is_dir) == place.parent
        place.unlink()
        place.parent.rmdir()
    assert find_named("data/x.txt", [folder]) is None
    assert looked_in("data/x.txt", [folder]) == f"{here}/data and {folder}/data"


def test_absolute_names_are_looked_up_nowhere_else(tmp_path: Path) -> None:
    file = write(tmp_path / "a" / "x.txt")
    assert find_named(file, [tmp_path]) == file
    assert find_named(tmp_path / "x.txt", [tmp_path / "a"]) is None


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "file.txt/below"])
def test_names_that_no_file_can_have_are_not_there(name: str, tmp_path: Path) -> None:
    write(tmp_path / "file.txt")
    assert find_named(name, [tmp_path]) is None


def test_a_repositorys_yaml_names_its_files_from_the_repositorys_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "repository" / "examples" / "one"
    tasks = write(one / "tasks.jsonl", '{"question": "?"}\n')
    agent = write(one / "agent.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(write(one / "one.yaml", YAML))
    assert config.ajet.task_reader.jsonl_dataset_file.training.file_path == str(tasks)
    assert config.ajet.rollout.user_workflow == f"{agent}->Agent"
