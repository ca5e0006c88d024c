"""How commands read their arguments and show errors, and their exit codes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from ajet.cli.main import COMMANDS, main
from ajet.system.command_line import place_advice, real, whole

JSON_COMMANDS = {
    "a run": ["--json", "--conf", "no-such.yaml"],
    "eval": ["eval", "no-such.yaml", "--json"],
    "runs": ["runs", "no-such-folder", "--json"],
    "tools": ["tools", "no_such_tool", "--json"],
}


@pytest.mark.parametrize("arguments", JSON_COMMANDS.values(), ids=JSON_COMMANDS)
def test_errors_are_json_where_the_output_is(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    error = json.loads(said.out.splitlines()[-1])
    assert error["event"] == "error" and error["exit_code"] == 2
    assert said.err == f"error: {error['error']}\n"
    assert main([argument for argument in arguments if argument != "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_an_interrupt_that_an_import_made_another_error_of_ends_a_run_like_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def run(*_: object) -> int:
        try:
            type("Settings", (), {"field": Field()})
        except (RuntimeError, KeyboardInterrupt) as error:  # by Python's version
            raise ModuleNotFoundError("Could not import module 'set_seed'") from error
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ajet.backbone.debug.run", run)
    assert main(["init", "my-agent"]) == 0
    monkeypatch.chdir(tmp_path / "my-agent")
    assert main(["--conf", "my-agent.yaml", "--backbone=debug", "model.path=tiny:qwen2"]) == 130
    said = capsys.readouterr().err
    assert "interrupted. Nothing is saved" in said and "error:" not in said


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_unknown_flag_is_an_error_like_any_other(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--no-such-flag"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "--help" in said and len(said.splitlines()) <= 3


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (whole(1), "0", "write a whole number, at least 1"),
        (whole(1), "two", "write a whole number, at least 1"),
        (whole(1), "2000000000", "write a whole number from 1 to 1,000,000,000"),
        (whole(1, 1000), "0", "write a whole number from 1 to 1,000"),
        (real(0.1, 1e7, "seconds"), "0", "write a number of seconds, at least 0.1"),
        (real(0, 1), "80", "write a number from 0 to 1"),
    ],
)
def test_an_upper_bound_that_only_guards_is_named_only_beyond_it(
    kind: Callable[[str], float], given: str, said: str
) -> None:
    with pytest.raises(ArgumentTypeError) as raised:
        kind(given)
    assert str(raised.value) == f"{given!r}: {said}"


FEW_FILES = """
import resource
from ajet.cli.main import main
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
main(["tools", "no_such_tool"])
print(min(hard, 4096) if hard > 0 else 4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_a_command_may_open_more_files_than_the_system_lets_programs_open_at_first() -> None:
    ended = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, timeout=60)
    wanted, soft = ended.stdout.split()
    assert soft == wanted, ended.stderr


POOL = """
import multiprocessing, time
from ajet.system.command_line import interrupted_when_whole, termination_like_interrupt
fork = multiprocessing.get_context("fork")
begun = fork.Event()
def work():
    begun.set()
    time.sleep(60)
with termination_like_interrupt(), interrupted_when_whole(lambda: False):
    worker = fork.Process(target=work)
    worker.start()
    begun.wait()  # Python forgets signals that come while it forks
    worker.terminate()
    worker.join()
    print(worker.exitcode)
"""


def test_a_process_that_user_code_forks_is_terminated_without_a_word() -> None:
    ended = subprocess.run([sys.executable, "-c", POOL], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("-15\n", "")


def test_what_to_do_at_the_limit_of_open_files() -> None:
    advice = place_advice(OSError(errno.EMFILE, "Too many open files"))
    assert advice is not None and advice.startswith("this process: Too many open files\n")
    assert "rollout.max_env_worker" in advice


def test_a_home_that_is_not_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a container whose user has no name, or for a `~name` that is mistyped."""
    monkeypatch.delenv("AJET_STATE_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["nobody"])
    assert main(["--kill"]) == 2
    assert capsys.readouterr().err == (
        "error: there is no home folder for a path that begins with ~\n    set HOME, or write the path in full\n"
    )
