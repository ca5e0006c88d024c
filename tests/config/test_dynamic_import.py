"""`module->Class` and `file.py->Class`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ajet.config.dynamic_import import import_class, source_file
from ajet.schema.errors import ImportPathError
from ajet.schema.task import Task

KEY = "ajet.rollout.user_workflow"
WORKFLOW = """
from __future__ import annotations
from ajet.schema.task import Task

class Mine(Task):
    label: str = {label!r}
    other: Mine | None = None

NUMBER = 3
"""


def write(folder: Path, label: str, name: str = "agent.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(WORKFLOW.format(label=label))
    return folder / name


def load(spec: object, **options: object) -> type[Task]:
    return import_class(str(spec), Task, key=KEY, **options)  # type: ignore[arg-type]


def test_a_file_is_found_in_the_working_directory_then_beside_the_yaml(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "conf", "yaml")
    assert load("agent.py->Mine", folders=[tmp_path / "conf"])(main_query="").label == "yaml"
    write(tmp_path, "here")
    assert load("agent.py->Mine", folders=[tmp_path / "conf"])(main_query="").label == "here"


def test_two_files_of_one_name_do_not_collide(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "a"), write(tmp_path / "b", "b")
    one, two = load(f"{first}->Mine"), load(f"{second} -> Mine")
    assert (one().label, two().label) == ("a", "b")
    assert load(f"{first}->Mine") is one
    assert source_file(two) == second


@pytest.mark.parametrize("statement", ["from .neighbour import WORD", "from neighbour_of_{id} import WORD"])
def test_a_file_imports_its_neighbours(tmp_path: Path, statement: str) -> None:
    unique = tmp_path.name.replace("-", "_")
    (tmp_path / "neighbour.py").write_text("WORD = 'hello'")
    (tmp_path / f"neighbour_of_{unique}.py").write_text("WORD = 'hello'")
    statement = statement.format(id=unique)
    (tmp_path / "main.py").write_text(f"{statement}\nfrom ajet import Task\nclass Mine(Task): word: str = WORD")
    assert load(f"{tmp_path}/main.py->Mine")().word == "hello"


def test_a_module_of_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    package = f"pkg_{tmp_path.name.replace('-', '_')}"
    write(tmp_path / package, "module")
    monkeypatch.chdir(tmp_path)
    assert load(f"{package}.agent->Mine")().label == "module"
    with pytest.raises(ImportPathError, match=rf"no module '{package}.agnt'. Did you mean '{package}.agent'"):
        load(f"{package}.agnt->Mine")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("agent.py", "should be 'module.path->Class'"),
        ("agent.py->", "should be"),
        ("->Mine", "should be"),
        ("agnt.py->Mine", "Did you mean 'agent.py'"),
        ("agent.py->Mne", "no class 'Mne' in agent.py. Did you mean 'Mine'"),
        ("agent.py->NUMBER", "is a int, not a subclass of ajet.schema.task.Task"),
        ("broken.py->Mine", r"broken.py can't be imported: ZeroDivisionError: .*broken.py:2"),
        ("needy.py->Mine", "needy.py can't be imported: ModuleNotFoundError: No module named 'surely_absent'"),
        ("no_such_thing.at_all->Mine", "no module 'no_such_thing'"),
        ("ajet.schema.task->Mine", "no class 'Mine' in ajet.schema.task"),
    ],
)
def test_errors_name_the_key_and_what_exists(tmp_path: Path, monkeypatch, spec: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "x")
    (tmp_path / "broken.py").write_text("\n1 / 0")
    (tmp_path / "needy.py").write_text("import surely_absent")
    with pytest.raises(ImportPathError, match=says) as caught:
        load(spec)
    assert str(caught.value).startswith(KEY)
