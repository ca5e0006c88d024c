"""AppWorld's stand-in: the interpreter, the tasks, the service and runs; the glue to the real package as far as it goes
without its data."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.engine.scripted import ScriptedCall
from ajet.schema.errors import EnvironmentFault
from ajet.schema.task import Task
from support.tutorial_runs import TUTORIAL, debug, imports, play, train

CONF = "example_appworld/small_world.yaml"
FOLDER = TUTORIAL / "example_appworld"


@pytest.fixture
def files() -> Iterator[Any]:
    with imports("example_appworld"):
        import apps
        import interpreter
        import small_world

        yield type("Files", (), {"apps": apps, "interpreter": interpreter, "small_world": small_world})


def block(code: str) -> str:
    return f"Let me see.\n```python\n{code}\n```"


LOGIN = """word = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}
token = {app: value for app, value in
         [("notes", apis.notes.login(password=word["notes"])["access_token"]),
          ("wallet", apis.wallet.login(password=word["wallet"])["access_token"])]}"""
SOLUTIONS = {
    r"How much have I paid to (\w+) in all\?": """paid = apis.wallet.show_payments(access_token=token["wallet"])
apis.supervisor.complete_task(answer=sum(p["amount"] for p in paid if p["to"] == "{0}"))""",
    r"What is the phone number of (\w+)\?": """for c in apis.contacts.show_contacts():
    if c["name"] == "{0}":
        apis.supervisor.complete_task(answer=c["phone"])""",
    r"Delete all my notes about (\w+)\.": """for n in apis.notes.show_notes(access_token=token["notes"]):
    if n["subject"] == "{0}":
        apis.notes.delete_note(access_token=token["notes"], note_id=n["note_id"])
apis.supervisor.complete_task()""",
    r"Pay (\d+) to (\w+) for (\w+)\.": """t = token["wallet"]
apis.wallet.pay(access_token=t, to="{1}", amount={0}, reason="{2}")
apis.supervisor.complete_task()""",
}


def solution(text: str) -> str:
    """The code that does what the supervisor wants."""
    for pattern, code in SOLUTIONS.items():
        if found := re.search(pattern, text):
            for number, value in enumerate(found.groups()):
                code = code.replace(f"{{{number}}}", value)
            return code
    raise AssertionError(text)


def test_every_task_can_be_solved_and_idleness_solves_none(files: Any) -> None:
    world = files.small_world.SmallWorld()
    for split in ("train", "dev"):
        for name in world.task_ids(split):
            first = world.reset(Task(task_id=name, main_query="x"))
            assert world.evaluate() < 1
            world.step(block("apis.supervisor.complete_task()"))
            assert world.evaluate() < 1 or "Delete" in first[1]["content"]  # there may be nothing to delete
            world.reset(Task(task_id=name, main_query="x"))
            assert not world.step(block(LOGIN)).done
            assert world.step(block(solution(first[1]["content"]))).done
            assert world.evaluate() == 1, first


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(1 + 2)", "3"),
        ("[x * 2 for x in range(3) if x]", "[2, 4]"),
        ("a = 1\nfor b in [1, 2, 3]:\n    if b == 2:\n        continue\n    a += b\nprint(f'{a:>3}')", "  5"),
        ("sorted({'b': 1, 'a': 2}.items(), key=lambda pair: pair[0])", "[('a', 2), ('b', 1)]"),
        ("import os", "Error: Import is not known in this small world"),
        ("().__class__", "Error: Attribute is not known in this small world"),
        ("''.__class__()", "Error: str has no method '__class__' here"),
        ("open('/etc/passwd')", "Error: only apps, methods and the usual functions can be called"),
        ("x = [0]\nwhile True:\n    x = [x, x]", "Error: a value became too large"),
        ("while True:\n    pass", "Error: the code takes too long"),
        ("9 ** 9", "Error: Pow is not known here for these values"),
        ("'a' * 9", "Error: Mult is not known here for these values"),
        ("f'{1:999999d}'", "Error: the format '999999d' is not known here"),
        ("a = []\na.append(a)\na", "Error: the code is nested too deeply"),
        ("print('kept')\n1 / 0", "kept\nZeroDivisionError: division by zero"),
        ("x =", "SyntaxError: invalid syntax (line 1)"),
        ("apis.notes.show_notes(access_token='guessed')", "Error: log in first: apis.notes.login(password=…)"),
        (
            "apis.notes.burn()",
            "Error: there is no apis.notes.burn: see apis.api_docs.show_api_descriptions(app_name=…)",
        ),
        ("apis.wallet.login()", "Error: apis.wallet.login: missing a required argument: 'password'"),
    ],
)
def test_code_is_interpreted_and_never_executed(files: Any, code: str, output: str) -> None:
    world = files.small_world.SmallWorld()
    world.reset(Task(task_id="train-0", main_query="x"))
    assert world.step(block(code)).observation == f"Output:\n```\n{output}\n```"


def test_names_stay_and_a_reply_without_a_block_is_answered(files: Any) -> None:
    world = files.small_world.SmallWorld()
    world.reset(Task(task_id="train-0", main_query="x"))
    world.step(block("a = [1]"))
    assert "[1]" in world.step(block("a")).observation
    assert "Write a Python block" in world.step("I would rather not.").observation


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def world_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a running server of the small world."""
    port = free_port()
    target = f"{FOLDER}/small_world.py->SmallWorld"
    command = [sys.executable, "-m", "ajet", "env", "serve", target, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and str(port) in server.stdout.readline()
        monkeypatch.setenv("WORLD_PORT", str(port))
        yield port
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_an_episode_over_http(monkeypatch: pytest.MonkeyPatch, world_port: int) -> None:
    def replies(call: ScriptedCall) -> object:
        return block(LOGIN if call.index == 0 else solution(call.prompt.rpartition("supervisor's task:")[2]))

    task = Task(task_id="dev-3", main_query="", env_type="small_world")
    episode = play(monkeypatch, CONF, task, replies)
    assert episode.failure is None, episode.failure
    assert episode.reward == 1.5 and episode.is_success and len(episode.tree.calls) == 2


@pytest.mark.slow
def test_on_debug_and_two_steps_on_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run starts its server by itself."""
    monkeypatch.setenv("WORLD_PORT", str(free_port()))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    short = ["rollout.max_response_length_in_one_turn=8", "rollout.compute_madness_checklist=[]"]
    episodes = debug(monkeypatch, CONF, tmp_path / "debug", *short, "rollout.multi_turn.max_steps=2")
    assert len(episodes) == 2 and all(0 <= (episode.reward or 0) < 1 for episode in episodes)
    train(monkeypatch, CONF, tmp_path / "local", *short, "rollout.multi_turn.max_steps=2")


MOCK = '''
"""A mock of the package appworld, whose data can't be had here: the names that the worker uses."""
import contextlib, io, types

def load_task_ids(split):
    print("noise that must not mix with the answer")
    return [f"{split}_1"]

class AppWorld:
    def __init__(self, task_id, experiment_name):
        if task_id == "broken":
            raise Exception("no such task")
        person = types.SimpleNamespace(first_name="Ada", last_name="Abel", email="a@example.com", phone_number="7")
        self.task = types.SimpleNamespace(supervisor=person, instruction="Call me.")
        self.done = False

    def execute(self, code):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code, {"world": self})
        return said.getvalue()

    def task_completed(self):
        return self.done

    def evaluate(self):
        return types.SimpleNamespace(to_dict=lambda: {"passes": [1], "failures": [1, 2, 3]})
'''


@pytest.fixture
def real_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The environment of the real AppWorld, over a Python that has the mock."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "appworld.py").write_text(MOCK)
    (tmp_path / "root" / "experiments").mkdir(parents=True)
    monkeypatch.setenv("APPWORLD_PYTHON", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.setenv("APPWORLD_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("SECRET_KEY", "canary")
    with imports("example_appworld"):
        import appworld_env

        yield appworld_env


def test_the_real_one_is_driven_in_its_own_python_and_confined(real_world: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("canary")
    assert real_world.AppWorldEnv.task_ids("dev") == ["dev_1"]
    world = real_world.AppWorldEnv(timeout=60)
    try:
        first = world.reset(Task(task_id="dev_1", main_query="x"))
        assert "Call me." in first[1]["content"] and "first name Ada" in first[1]["content"]
        assert "hello" in world.step(block("print('hello')")).observation
        assert "canary" not in world.step(block("import os; print(dict(os.environ))")).observation
        with pytest.raises(EnvironmentFault, match="No such file"):
            world.step(block(f"open({str(tmp_path / 'secret.txt')!r})"))
        with pytest.raises(EnvironmentFault, match="unreachable"):
            world.step(block("import socket; socket.create_connection(('192.0.2.1', 80), 5)"))
        with pytest.raises(EnvironmentFault, match="Read-only"):
            world.step(block(f"open({os.environ['APPWORLD_ROOT']!r} + '/x', 'w')"))
        assert not world.step("no block").done
        assert world.step(block("world.done = True")).done
        assert world.evaluate() == 0.25
        with pytest.raises(EnvironmentFault, match="ended or wrote nonsense"):
            world.step(block("import os; os._exit(3)"))
    finally:
        world.close()


def test_what_the_real_one_lacks_is_said(real_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = real_world.AppWorldEnv(timeout=60)
    try:
        with pytest.raises(EnvironmentFault, match="AppWorld: Exception: no such task"):
            world.reset(Task(task_id="broken", main_query="x"))
    finally:
        world.close()
    monkeypatch.setenv("APPWORLD_ROOT", "/nowhere")
    with pytest.raises(EnvironmentFault, match="APPWORLD_ROOT must name"):
        real_world.AppWorldEnv.task_ids("dev")
    monkeypatch.delenv("APPWORLD_PYTHON")
    with pytest.raises(EnvironmentFault, match="APPWORLD_PYTHON must name"):
        real_world.AppWorldEnv.task_ids("dev")
