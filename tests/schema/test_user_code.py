"""`load_symbol`: the user's classes by file and by module, and errors that say what exists instead."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import textwrap
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ajet.schema.errors import ImportPathError
from ajet.schema.task import Task
from ajet.schema.user_code import built, find_file, forget_files, import_class, load_symbol, split_import_path


class Animal:
    """A base class to derive from."""


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_two_files_of_one_name_do_not_collide(tmp_path: Path) -> None:
    a = write(tmp_path / "a" / "flow.py", "class Flow: place = 'a'")
    b = write(tmp_path / "b" / "flow.py", "class Flow: place = 'b'")
    assert load_symbol(f"{a}->Flow").place == "a"
    assert load_symbol(f"{b}->Flow").place == "b"
    assert load_symbol(f"{a}->Flow") is load_symbol(f"{a}->Flow")


def test_a_folder_whose_name_is_no_unicode(tmp_path: Path) -> None:
    assert load_symbol(f"{write(tmp_path / os.fsdecode(b'b' + bytes([233])) / 'flow.py', 'class Flow: pass')}->Flow")


@pytest.mark.parametrize("statement", ["from .helper import NAME", "from . import helper; NAME = helper.NAME"])
def test_what_was_forgotten_is_imported_as_it_is_by_then(tmp_path: Path, statement: str) -> None:
    flow = write(tmp_path / "flow.py", f"{statement}\nclass Flow: name = NAME")
    for name in ("old", "newer"):  # of two lengths, which Python's cache of compiled files tells apart
        write(tmp_path / "helper.py", f"NAME = {name!r}")
        assert load_symbol(f"{flow}->Flow").name == name
        forget_files()


@pytest.mark.parametrize("statement", ["from helper import NAME", "from .helper import NAME"])
def test_neighbours_can_be_imported_and_do_not_collide(tmp_path: Path, statement: str) -> None:
    for folder in "ab":
        write(tmp_path / folder / "helper.py", f"NAME = '{folder}'")
        write(tmp_path / folder / "flow.py", f"{statement}\nclass Flow: name = NAME")
    assert load_symbol(f"{tmp_path}/a/flow.py->Flow").name == "a"
    assert load_symbol(f"{tmp_path}/b/flow.py->Flow").name == "b"


def test_a_module_is_found_from_the_base_folder(tmp_path: Path) -> None:
    write(tmp_path / "some_pack_x" / "deep.py", "class Outer:\n    class Inner: value = 7")
    assert load_symbol("some_pack_x.deep->Outer.Inner", [tmp_path]).value == 7


def test_a_file_is_found_from_the_working_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = write(tmp_path / "here" / "f.py", ""), write(tmp_path / "there" / "f.py", "")
    monkeypatch.chdir(here.parent)
    assert find_file("f.py", [there.parent]) == here
    here.unlink()
    assert find_file("f.py", [there.parent]) == there


def test_data_classes_and_pickle_work_in_a_loaded_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "flow.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 3\n",
    )
    import pickle

    point = load_symbol(f"{file}->P")()
    assert pickle.loads(pickle.dumps(point)) == point  # noqa: S301


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("missing.py->Flow", "", r"no file 'missing.py'.*there is: flow.py"),
        ("flwo.py->Flow", "", r"did you mean 'flow.py'"),
        ("flow.py->Flaw", "class Flow: pass", r"has no 'Flaw'; did you mean 'Flow'"),
        ("flow.py->Zebra", "class Flow: pass\ndef run(): pass", r"has no 'Zebra'; there is: Flow, run"),
        ("flow.py->Flow", "x = 1\nclass Flow(: pass", r"flow.py:2: .*class Flow\("),
        ("flow.py->Flow", "\n\nraise RuntimeError('no')", r"flow.py:3: .*failed with RuntimeError: no"),
        ("flow.py->Flow", "import sys\nsys.exit(0)", r"flow.py:2: .*failed with SystemExit"),
        (
            "flow.py->Flow",
            "raise ImportError('no ReActAgent', name='agentscope.agent')",
            r"flow.py:1: .*it is written for AgentScope (1\.0|2), and \d\S* is installed: pip install 'agentscope[<>]",
        ),
        (
            "flow.py->Flow",
            "from ajet import Workflow\nclass Flow(Workflow):\n    prompt = 'Hi'",
            r"flow.py:2: .*`prompt = 'Hi'`. All model fields require a type annotation; .*$",
        ),
        ("flow.py->Flow", "import not_there_at_all", r"flow.py:1: .*install it, or put not_there_at_all.py next to"),
        ("flow.py:Flow", "", r"write `module.path->Class`.*flow.py->Flow"),
        ("flow.py->", "", r"doesn't name a class"),
        ("flow.py-", "", r"doesn't name a class: .*in quotes, or the shell takes"),
        ("ajet.schema.taks->Task", "", r"no module 'ajet.schema.taks'; did you mean 'task'"),
    ],
)
def test_errors_say_what_exists_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "flow.py", text)
    with pytest.raises(ImportPathError, match=says):
        load_symbol(name)


def test_the_wrong_kind_is_refused_with_what_fits(tmp_path: Path) -> None:
    file = write(tmp_path / "flow.py", "class Flow: pass\nprint_ = print\n")
    with pytest.raises(ImportPathError, match=r"isn't a class derived from Animal$"):
        load_symbol(f"{file}->Flow", expects=Animal)


def test_an_import_in_another_thread_meanwhile_misses_no_folder(tmp_path: Path) -> None:
    """It walks over `sys.path` by position: an entry taken out before it would make it skip another one."""
    (tmp_path / "walks.py").write_text("import sys\nFOUND = iter(sys.path)\nNEXT = next(FOUND)\nclass Agent: ...\n")
    before = list(sys.path)
    load_symbol(f"{tmp_path / 'walks.py'}->Agent")
    walk = sys.modules[load_symbol(f"{tmp_path / 'walks.py'}->Agent").__module__]
    assert [walk.NEXT, *walk.FOUND] == [str(tmp_path), *before, *([] if str(tmp_path) in before else [str(tmp_path)])]


def test_a_failed_import_can_be_repeated_after_the_fix(tmp_path: Path) -> None:
    file = write(tmp_path / "flow.py", "oops")
    with pytest.raises(ImportPathError):
        load_symbol(f"{file}->Flow")
    file.write_text("class Flow: fixed = True")
    assert load_symbol(f"{file}->Flow").fixed


def test_a_file_that_changes_the_working_directory_moves_no_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("import os\nos.chdir('/')\nclass Agent: ...\n")
    load_symbol("agent.py->Agent")
    assert Path.cwd() == tmp_path
    assert "changed the working directory to /: it is put back" in caplog.text


def test_imports_of_several_threads_leave_the_working_directory_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    builtins.both_import, builtins.one_is_over = threading.Barrier(2), threading.Event()  # type: ignore[attr-defined]
    write(tmp_path / "moves.py", "import os\nos.chdir('/')\nboth_import.wait(10)\nclass A: ...")
    write(tmp_path / "stays.py", "both_import.wait(10)\none_is_over.wait(10)\nclass B: ...")
    with ThreadPoolExecutor(2) as threads:
        moves = threads.submit(load_symbol, f"{tmp_path}/moves.py->A")
        while Path.cwd() == tmp_path and not moves.done():
            time.sleep(0.01)
        stays = threads.submit(load_symbol, f"{tmp_path}/stays.py->B")
        moves.result()
        builtins.one_is_over.set()  # type: ignore[attr-defined]
        stays.result()
    assert Path.cwd() == tmp_path


def test_a_file_that_ends_in_a_removed_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    lines = ("import os", *(f"os.{do}({str(gone)!r})" for do in ("mkdir", "chdir", "rmdir")), "class Agent: ...")
    file = write(tmp_path / "agent.py", "\n".join(lines))
    load_symbol(f"{file}->Agent")
    assert Path.cwd() == tmp_path


def test_an_interrupted_import_begins_anew(tmp_path: Path) -> None:
    agent = write(tmp_path / "agent.py", "raise KeyboardInterrupt\nclass Agent: ...")
    with pytest.raises(KeyboardInterrupt):
        load_symbol(f"{agent}->Agent")
    write(agent, "class Agent: ...")
    assert load_symbol(f"{agent}->Agent").__name__ == "Agent"


def test_it_works_without_a_folder_on_the_path(tmp_path: Path) -> None:
    """As in the `ajet` command, whose `sys.path` does not hold the working directory."""
    write(tmp_path / "pack_y" / "flow.py", "from pack_y.helper import N\nclass Flow: n = N")
    write(tmp_path / "pack_y" / "helper.py", "N = 5")
    code = "from ajet.schema.user_code import load_symbol as l; print(l('pack_y.flow->Flow').n)"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(Path.cwd())!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "5"


def test_splitting() -> None:
    assert split_import_path(" a/b.py -> C ") == ("a/b.py", "C")
    assert split_import_path("a/b.py->C").is_file
    assert not split_import_path("a.b->C").is_file


def test_a_class_is_imported_under_its_key(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("from ajet import Task\nclass Mine(Task): pass\n")
    mine = import_class(f"{file}->Mine", Task, key="ajet.rollout.user_workflow")
    assert issubclass(mine, Task)
    with pytest.raises(ImportPathError, match=r"^ajet\.rollout\.user_workflow: .*did you mean 'Mine'"):
        import_class(f"{file}->Mne", Task, key="ajet.rollout.user_workflow")


class Needs:
    def __init__(self) -> None:
        pass


class Lacks(ABC):
    @abstractmethod
    def act(self) -> None: ...


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Needs, r"key: the run makes a Needs\(config\), .*\n    write `def __init__\(self, config\)`"),
        (Lacks, r"key: Lacks has no `act`: define it"),
    ],
)
def test_a_class_that_can_not_be_made_says_why(found: type, says: str) -> None:
    with pytest.raises(ImportPathError, match=says):
        built(found, "key", "config", 1)


def test_code_is_also_found_above_the_base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "repo" / "tutorial" / "deep" / "agent.py", "class Agent: place = 'repo'")
    write(tmp_path / "here" / "tutorial" / "other.py", "")
    monkeypatch.chdir(tmp_path / "here")
    base = tmp_path / "repo" / "tutorial" / "deep"
    assert load_symbol("tutorial.deep.agent->Agent", [base]).place == "repo"
    assert find_file("tutorial/deep/agent.py", [base]) == base / "agent.py"


def test_an_import_in_another_thread_meanwhile_adds_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports add to `sys.modules` while it is looked through: here, at the first name that is looked at."""
    for folder in ("one", "two"):
        write(tmp_path / folder / "flow.py", "import helper_z\nclass Flow: n = helper_z.N")
        write(tmp_path / folder / "helper_z.py", f"N = {folder!r}")
    assert load_symbol(f"{tmp_path / 'one' / 'flow.py'}->Flow").n == "one"

    class Importing(str):
        def partition(self, separator: str) -> tuple[str, str, str]:
            monkeypatch.setitem(sys.modules, f"meanwhile_{len(sys.modules)}", sys)
            return super().partition(separator)

    monkeypatch.setitem(sys.modules, Importing("an_import_z"), sys)
    assert load_symbol(f"{tmp_path / 'two' / 'flow.py'}->Flow").n == "two"


def test_threads_that_import_one_file_all_get_the_whole_of_it(tmp_path: Path) -> None:
    write(tmp_path / "slow_one.py", "import time\ntime.sleep(0.3)\nclass Flow: n = 1")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: load_symbol(f"{tmp_path / 'slow_one.py'}->Flow"), range(8)))
    assert [flow.n for flow in found] == [1] * 8
    assert len(set(found)) == 1, "imported once"


def test_threads_that_import_one_file_with_a_mistake_all_hear_of_it(tmp_path: Path) -> None:
    write(tmp_path / "slow_mistake.py", "import time\ntime.sleep(0.1)\nraise ValueError('mine')")
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(load_symbol, f"{tmp_path / 'slow_mistake.py'}->Flow") for _ in range(3)]
    for each in found:
        with pytest.raises(ImportPathError, match=r"slow_mistake\.py:3: .* failed with ValueError: mine"):
            each.result()


def test_threads_that_import_files_which_need_each_other_both_end(tmp_path: Path) -> None:
    """Each of two threads has begun one of them when it asks for the other."""
    for own, other in (("left", "right"), ("right", "left")):
        code = f"""
        import builtins
        from pathlib import Path
        from ajet.schema.user_code import load_symbol
        builtins.both_z.wait(30)
        try:
            load_symbol(str(Path(__file__).with_name({other!r} + ".py")) + "->Flow")
        except Exception:
            pass  # one of them sees the other unfinished
        class Flow: n = 1
        """
        write(tmp_path / f"{own}.py", textwrap.dedent(code))
    builtins.both_z = threading.Barrier(2)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as threads:
        paths = [f"{tmp_path / own}.py->Flow" for own in ("left", "right")]
        found = [threads.submit(load_symbol, path) for path in paths]
        assert [one.result(60).n for one in found] == [1, 1]


def test_a_name_that_no_file_can_have() -> None:
    for place in ("a" * 300, f"{'a' * 300}/b"):
        with pytest.raises(ImportPathError, match="no file"):
            load_symbol(f"{place}.py->Flow")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from .helper import x", r"agent\.py:1: a relative import found no helper\.py next to the file$"),
        ("from ..helper import x", r"agent\.py:1: .*; write an absolute import"),
    ],
)
def test_a_relative_import_that_fails_names_the_users_file(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "agent.py").write_text(f"{line}\nclass A: ...\n", encoding="utf-8")
    with pytest.raises(ImportPathError, match=said) as refused:
        load_symbol(f"{tmp_path}/agent.py->A")
    assert "ajet_user_" not in str(refused.value)


def test_a_file_that_was_saved_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_bytes("class Flow: ...\n".encode("utf-16"))
    with pytest.raises(ImportPathError, match=r"agent\.py: .*null bytes: save it as UTF-8"):
        load_symbol(f"{file}->Flow")
