"""The `ajet` command line: its surface (frozen), its errors, and its quick start."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import ajet
from ajet import __version__
from ajet.backbone.launch import build_parser, parse_arguments
from ajet.cli.main import COMMANDS, RUN_HELP, main
from ajet.schema.errors import UserError

HEAVY = {
    "agentscope",
    "asyncio",
    "datasets",
    "langchain_core",
    "numpy",
    "omegaconf",
    "openai",
    "pydantic",
    "ray",
    "starlette",
    "torch",
    "transformers",
    "vllm",
    "yaml",
}
CPU_SECONDS = 0.25

FLAGS = {
    "--autokill",
    "--backbone",
    "--conf",
    "--debug",
    "--exp-dir",
    "--fresh",
    "--json",
    "--kill",
    "--prefix",
    "--quiet",
    "--ray-address",
    "--skip-check-avail-gpu",
    "--with-logview",
    "--with-ray",
    "--with-ray-cluster",
}
"""The surface that users' scripts rely on: a flag may be added here, never taken away."""

NAMES = {
    "agentops", "audit", "bench", "chat", "compare", "completion", "config", "diagnose", "doctor", "env", "eval",
    "export", "init", "judge", "migrate", "report", "rollout", "rubrics", "runner", "runs", "schema", "serve", "store",
    "tasks", "tools", "tune", "validate", "view", "vllm",
}  # fmt: skip


def test_the_surface_is_what_users_know() -> None:
    assert {flag for action in build_parser()._actions for flag in action.option_strings} == FLAGS
    assert set(COMMANDS) == NAMES
    assert all(flag in RUN_HELP for flag in FLAGS)


def run_python(program: str, *arguments: str) -> tuple[str, float]:
    """Its output, and the least CPU seconds of three tries (wall time depends on what else the machine does)."""
    least = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return ran.stdout, least


@pytest.mark.parametrize("what", ["import ajet", "--help", "--version"])
def test_it_answers_at_once_and_loads_nothing_heavy(what: str) -> None:
    tail = "; import sys; print('LOADED', *{name.split('.')[0] for name in sys.modules})"
    call = what if what.startswith("import") else f"from ajet.cli.main import main; main([{what!r}])"
    output, seconds = run_python(call + tail)
    assert not HEAVY & set(output.rpartition("LOADED")[2].split())
    assert seconds <= CPU_SECONDS


def test_a_runner_loads_nothing_of_a_run_before_it_knows_its_arguments() -> None:
    program = "import ajet.cli.runner, sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"numpy", "httpx", "ajet.task_runner", "ajet.config.root"} & set(ran.stdout.split())


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "ajet --conf FILE.yaml" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ajet {__version__}\n"
    assert main([]) == 2


@pytest.mark.parametrize("command", ["", *COMMANDS, "export episodes"])
def test_every_command_has_help_that_fits_eighty_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code: object = 0
    try:
        code = main([*command.split(), "--help"])
    except SystemExit as ended:
        code = ended.code
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and lines[0].startswith(f"usage: ajet {command}" if command else "ajet: ")
    assert not [line for line in lines if len(line) > 80]


def test_the_module_is_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "ajet", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"ajet {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inti"], "did you mean `ajet init`?"),
        (["x.yaml"], "ajet --conf x.yaml"),
        (["frobnicate"], "commands: "),
        (["--conf"], "expected one argument"),
        (["--backbone=debug"], "--conf FILE.yaml is required"),
        (["--conf", "x.yaml", "--backbon=debug"], "did you mean --backbone?"),
        (["--conf", "x.yaml", "y.yaml"], "write --conf y.yaml"),
        (["--conf", "x.yaml", "num_repeat"], "key=value"),
        (["--conf", "x.yaml", "--with-ray", "--ray-address=a"], "not allowed with"),
        (["--conf", "x.yaml", "--with-appworld=3"], "takes no value"),
        (["--conf", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["validate"], "the following arguments are required: CONF\n"),
        (["tasks", "generate", "x.yaml", "--out", "."], "--out . is a folder: name a file"),
        (["--conf", "x.yaml", "--backbone=verll"], "did you mean verl? allowed: local, debug, verl, trinity"),
    ],
)
def test_what_can_not_be_understood_is_one_message_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
    assert "Traceback" not in error


def test_arguments_in_any_order() -> None:
    line = "rollout.num_repeat=8 --with-appworld --conf a=b.yaml --debug x.y=1 --with-ray +mine.z="
    parsed = parse_arguments(line.split())
    assert parsed.conf == "a=b.yaml"
    assert parsed.services == ("appworld",)
    assert parsed.overrides == ("rollout.num_repeat=8", "+mine.z=", "x.y=1")
    assert parsed.debug_tags == "all"
    assert not parsed.options.ray_cluster and parsed.options.ray_address is None
    assert parse_arguments(["--conf", "x", "--debug", "A,B"]).debug_tags == "A,B"
    with pytest.raises(UserError):
        parse_arguments(["--conf", "x", "--quiet", "--json"])


@pytest.mark.parametrize("arguments", [("config", "schema"), ("runs", "--help"), ("nonsense",)])
def test_a_reader_that_goes_away_ends_a_command_as_it_ends_others(arguments: tuple[str, ...]) -> None:
    """`ajet … | head`, and `ajet … 2>&1 | head`: quietly, with the code of programs that SIGPIPE ends."""
    read, write = os.pipe()
    os.close(read)
    stderr = write if arguments == ("nonsense",) else subprocess.PIPE
    ran = subprocess.run(
        [sys.executable, "-m", "ajet", *arguments], stdout=write, stderr=stderr, text=True, check=False
    )
    os.close(write)
    assert not ran.stderr and ran.returncode == 141


def test_an_encoding_that_lacks_a_character_is_no_crash() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "ajet", "--help"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert b"\\u2026" in ran.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_crash(tmp_path: Path, closed: str) -> None:
    """Some daemons start programs so. What is opened first must not become standard output."""
    show = "import sys; from ajet.cli.main import _mend_streams; _mend_streams(); sys.stdout.isatty()"
    show += "; sys.stderr.write(''); file = open('first', 'w'); print('lost', flush=True); assert file.fileno() > 2"
    line = f'exec "{sys.executable}" -c "{show}" {closed}'
    environment = {**os.environ, "PYTHONPATH": str(Path(ajet.__file__).parents[1])}
    ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert ran.returncode == 0 and (tmp_path / "first").read_text() == ""


def test_output_for_which_the_disk_has_no_room_is_said_so() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "ajet", "config", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 1 and ran.stderr == "warning: what was printed is incomplete: No space left on device\n"


def test_a_folder_that_was_deleted_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    line = f'cd gone && rmdir ../gone && exec "{sys.executable}" -m ajet --conf x.yaml'
    environment = {**os.environ, "PYTHONPATH": str(Path(ajet.__file__).parents[1])}
    ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "error: the folder that this terminal is in was deleted\n    cd to another one\n"


def test_a_process_that_user_code_left_does_not_hold_the_end_and_ends_with_it() -> None:
    code = (
        "import multiprocessing, sys, time\n"
        "from ajet.cli import main\n"
        "main.EXIT_S = 0.1\n"
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), name='left').start()\n"
        "sys.argv = ['ajet', '--version']\n"
        "sys.exit(main.main())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)  # until both ended
    assert ended.returncode == 0
    assert ended.stderr == "warning: ended without waiting for: left\n"
