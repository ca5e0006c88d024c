"""Commands that take the names of runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ajet.cli.chat import _play_tools
from ajet.cli.completion import NAMES_A_RUN
from ajet.cli.main import COMMANDS, main
from ajet.cli.runs import print_table
from ajet.cli.targets import run_setting, target_config, weights_of
from ajet.observe.viewer import library
from support.screen import Terminal
from support.synthetic_run import write_experiment

CODES = {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with two runs."""
    root = tmp_path_factory.mktemp("project")
    for name, seed in (("math-agent", 0), ("math-agent-rloo", 1)):
        write_experiment(root / "saved_experiments", name, steps=6, tasks=2, seed=seed)
    return root


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_runs_lists_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "runs")
    head, *rows = out.splitlines()
    assert code == 0
    assert head.split()[:4] == ["run", "status", "step", "return"]
    assert {row.split()[0] for row in rows} == {"math-agent", "math-agent-rloo"}
    assert all(row.split()[2] == "6" for row in rows)
    _, out, _ = said(capsys, "runs", "--json")
    assert {json.loads(line)["name"] for line in out.splitlines()} == {"math-agent", "math-agent-rloo"}


def test_a_run_whose_files_may_not_be_looked_at_has_no_time(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet.observe.viewer.library._touched", lambda _path: 0.0)
    _, out, _ = said(capsys, "runs")
    assert " ago" not in out


def test_of_many_runs_each_is_looked_at_once_and_no_file_stays_open(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        shutil.copytree(folder / "saved_experiments" / "math-agent", tmp_path / f"run{number}")
    looked, touched = list[Path](), library._touched

    def look(path: Path) -> float:
        looked.append(path)
        return touched(path)

    monkeypatch.setattr(library, "_touched", look)
    runs = library.Library(tmp_path)
    names = runs.names()
    assert len(names) == len(looked) == 5
    before = len(os.listdir("/proc/self/fd"))
    assert {runs.get(name).summary()["episodes"] for name in names} == {48}
    assert len(looked) == 10 and len(os.listdir("/proc/self/fd")) == before
    for name in (
        "",
        ".",
        "..",
        f"../{tmp_path.name}/run0",
        str(tmp_path / "run0"),
        "run0/",
        "run0/code",
        "x" * 300,
        "\0",
    ):
        with pytest.raises(library.ExperimentNotFoundError):
            runs.get(name)


def test_runs_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = said(capsys, "runs", str(tmp_path))
    assert code == 2
    assert "no runs in" in error and "ajet --conf" in error


@pytest.mark.parametrize("columns", [40, 80])
def test_the_list_fits_the_terminal(here: Path, columns: int) -> None:
    with Terminal([sys.executable, "-m", "ajet", "runs"], columns=columns, cwd=here, env=CODES) as terminal:
        shown = terminal.finish()
    assert len(shown.splitlines()) == 3, shown
    assert "math-agent-rloo" in shown if columns == 80 else "math-ag" in shown


@pytest.mark.parametrize("columns", [36, 60])
def test_numbers_of_a_table_are_never_cut(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [["a model of a long name", "0.344 (0.267 … 0.430)", ""], ["b", "0.996 (0.964 … 1.000)", "+0.652"]]
    print_table(["model", "pass@1", "gain"], rows, right=(1, 2))
    lines = capsys.readouterr().out.splitlines()
    assert all("0.344 (0.267 … 0.430)" in line for line in lines if "0.344" in line)
    assert lines[-2:] == ["pass@1  0.996 (0.964 … 1.000)", "gain    +0.652"] if columns == 36 else len(lines) == 3


def test_of_a_long_key_the_end_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [[f"task_reader.jsonl_dataset_file.{split}.file_path", "x" * 20] for split in ("training", "validation")]
    print_table(["config", "run"], rows, ends=True)
    shown = capsys.readouterr().out
    assert "…training.file_path" in shown and "…lidation.file_path" in shown


@pytest.mark.parametrize("command", [("report",), ("export", "episodes"), ("compare", "math-agent")])
def test_a_name_that_is_no_run(here: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    code, _, error = said(capsys, *command, "math-agnt")
    assert code == 2
    assert "no such run" in error and "did you mean math-agent?" in error


def test_a_file_is_nothing_to_view(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "?"}\n')
    code, _, error = said(capsys, "view", str(tasks))
    assert code == 2 and "is a file: give the folder" in error


def test_weights_are_found_by_name(here: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hf = here / "saved_experiments" / "math-agent" / "hf"
    hf.mkdir(exist_ok=True)
    (hf / "config.json").write_text("{}")
    assert weights_of("math-agent") == str(hf)
    assert weights_of("openai-community/gpt2") == "openai-community/gpt2"
    code, _, _ = said(capsys, "export", "weights", "math-agent", str(tmp_path / "out"))
    assert code == 0
    assert (tmp_path / "out" / "config.json").exists()
    code, _, error = said(capsys, "export", "weights", "nowhere", str(tmp_path / "other"))
    assert code == 2 and "ajet runs" in error


def test_a_runs_system_message_and_tools(here: Path) -> None:
    setting = run_setting("math-agent")
    assert setting.system
    assert [tool["function"]["name"] for tool in setting.tools] == ["calculator"]
    assert run_setting("tiny:qwen2") == ("", ())
    (here / "saved_experiments" / "math-agent" / "hf").mkdir(exist_ok=True)
    (here / "saved_experiments" / "math-agent" / "hf" / "config.json").write_text("{}")
    assert target_config("math-agent").ajet.rollout.max_model_len > 0


def test_chat_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "replies.yaml").write_text("- It is 42\n")
    rollout = f"rollout: {{engine: scripted, scripted_replies: {tmp_path}/replies.yaml}}"
    (tmp_path / "talk.yaml").write_text(f"ajet:\n  model: {{path: 'tiny:qwen2'}}\n  {rollout}\n")
    command = [sys.executable, "-m", "ajet", "chat", "talk.yaml", "--system", "Be brief."]
    with Terminal(command, cwd=tmp_path, env=CODES) as terminal:
        terminal.wait_for("loading tiny:qwen2")
        terminal.wait_for("talk.yaml, with its system message. /help lists the commands.")
        for typed, answer in (
            ("/help", "/exit     leave"),
            ("/hlp", "unknown command /hlp"),
            ("/prompt", "Be brief."),
            ("What is 6*7?", "It is 42"),
        ):
            terminal.type(f"{typed}\n")
            terminal.wait_for(answer)
        terminal.type("/exit\n")
        terminal.finish()
        assert terminal.process.returncode == 0


def test_the_user_plays_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or "42")
    call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}
    answers = _play_tools({"role": "assistant", "tool_calls": [call]})
    assert answers == [{"role": "tool", "tool_call_id": "c1", "content": "42"}]
    assert asked == ["result of calculator: "]
    assert _play_tools({"role": "assistant", "content": "done"}) == []


def test_schema_is_the_editors(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, "schema")
    assert json.loads(out) == json.loads(said(capsys, "config", "schema")[1])


COMPLETE = """
source <({python} -m ajet completion bash)
complete_line() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ajet; echo "${{COMPREPLY[@]}}"; }}
complete_line ajet ch
complete_line ajet compare math-agent math-agent-
complete_line ajet --conf x.yaml --backbone d
complete_line ajet --conf x.yaml rollout.num_rep
complete_line ajet export weights --be
complete_line ajet --conf x.yaml --backbone = d
complete_line ajet --conf x.yaml --backbone =
complete_line ajet --conf x.yaml rollout.engine = v
complete_line ajet --conf = c
"""


def test_bash_completes(here: Path) -> None:
    script = COMPLETE.format(python=sys.executable)
    (here / "config.yaml").touch()
    done = subprocess.run(
        ["bash", "-c", script], cwd=here, env={**os.environ, **CODES}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[:5] == ["chat", "math-agent-rloo", "debug", "rollout.num_repeat=", "--best"]
    # bash gives `--backbone=d` as three words
    assert done.stdout.splitlines()[5:] == ["debug", "local debug verl trinity prompt", "", "config.yaml"]
    assert not done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_script(here: Path, shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether they complete is tried where they are installed."""
    _, script, _ = said(capsys, "completion", shell)
    assert all(name in script for name in COMMANDS)
    assert set(COMMANDS) >= set(NAMES_A_RUN)
    assert shell == "fish" or 'export) words="weights episodes prompt ' in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    (here / f"completion.{shell}").write_text(script)
    asks = {"fish": 'complete -C "ajet compare math-agent-"', "zsh": "echo $_comps[ajet]"}[shell]
    flags = ["-f"] if shell == "zsh" else ["--no-config"]
    done = subprocess.run(
        [shell, *flags, "-c", f"source ./completion.{shell}; {asks}"],
        cwd=here,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"fish": "math-agent-rloo", "zsh": "_ajet"}[shell] in done.stdout, done.stderr
