"""Places, names and addresses that users get wrong: one message that names the place or key and the way out, exit code
2, and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ajet.cli.main import main

CONFIG = """\
ajet:
  backbone: debug
  model: {path: tiny:qwen2-0.3m}
  task_reader: {type: jsonl_dataset_file, jsonl_dataset_file: {training: {file_path: tasks.jsonl}}}
  rollout: {user_workflow: agent.py->Agent, engine: scripted, scripted_replies: replies.yaml}
"""
AGENT = """\
from ajet import Workflow, WorkflowOutput


class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        return WorkflowOutput(reward=1.0)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AJET_STATE_DIR", str(tmp_path / "state"))
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "agent.py").write_text(AGENT)
    (folder / "replies.yaml").write_text("[hello]\n")
    (folder / "tasks.jsonl").write_text('{"query": "hello"}\n')
    (folder / "a_file").write_text("")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said."""
    code = main(arguments)
    said = capsys.readouterr()
    assert code == 2, said
    assert "Traceback" not in said.err
    assert "error: " in said.err
    assert len(said.err) < 1500
    return said.err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--exp-dir", "a_file"], ["a_file/run-debug", "--exp-dir"]),
        (["experiment_dir=a_file/x"], ["ajet.experiment_dir", "a_file"]),
        ([f"experiment_name={'x' * 300}"], ["ajet.experiment_name", "at most 200 bytes"]),
        ([f"experiment_name={'ü' * 150}"], ["ajet.experiment_name", "at most 200 bytes"]),
        (["experiment_name=a\u202eb"], ["ajet.experiment_name", "control characters", "\\u202e"]),
        (["experiment_name=\udced"], ["experiment_name", "isn't UTF-8"]),
        (["--exp-dir", "x" * 300], ["xxx", "too long", "--exp-dir"]),
        (["gateway.host=no.such.host.invalid"], ["gateway.host"]),
        (["gateway.host=203.0.113.7"], ["203.0.113.7", "gateway.host"]),
        (["gateway.port=70000"], ["ajet.gateway.port", "65535"]),
        (["model.path=/etc"], ["ajet.model.path", "'/etc' holds no config.json"]),
        (["model.path=/dev/null"], ["ajet.model.path", "is not a folder"]),
        (["model.path=tiny:nope"], ["model.path", "tiny:nope", "tiny:qwen2-0.3m"]),
        ([f"model.path={'y' * 5000}/x/y"], ["ajet.model.path", "no file or folder"]),
        ([f"data.train_batch_size={'9' * 200}"], ["ajet.data.train_batch_size", "at most 18 digits"]),
        ([f"task_reader.type={'a' * 300}.py->Reader"], ["ajet.task_reader.type"]),
        (["task_reader.type=json->JSONDecoder"], ["ajet.task_reader.type", "BaseTaskReader"]),
        (["--rollout.num_repeat=8"], ["unknown flag", "\n    write rollout.num_repeat=8\n"]),
    ],
    ids=lambda value: str(value)[2:40] if isinstance(value, list) else None,
)
def test_a_run_with_a_mistake_ends_with_one_message(
    arguments: list[str], names: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "--conf", "run.yaml", "--backbone=debug", *arguments)
    for name in names:
        assert name in said, said


@pytest.mark.parametrize("path", ["/etc", "/dev/null", "tiny:nope", "no/such/folder"])
def test_validate_refuses_what_is_no_model(path: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "validate", "run.yaml", f"model.path={path}")
    assert "ajet.model.path" in said
    assert path in said


@pytest.mark.parametrize(("name", "why"), [("nowhere.yaml", "No such file"), (".", "Is a directory")])
def test_a_file_of_replies_that_is_none(name: str, why: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"error: {name}: {why}" in refused(capsys, "validate", "run.yaml", "--replies", name)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["adapter_config.json", "config.json"], "holds a LoRA adapter, not a model\n    merge it into its base model"),
        (["some-Q4.gguf"], "only GGUF\n    name the model that it was made from"),
        (["snapshots/abc/config.json"], "holds no config.json\n    name '/"),
    ],
)
def test_other_things_of_the_hub_are_told_apart(
    files: list[str], said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files:
        there = project / "model" / file
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text("{}")
    assert said in refused(capsys, "validate", "run.yaml", "model.path=model")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bench a_file", "it needs a `rows:` list"),
        ("migrate a_file", "it needs the other system's keys"),
        ("validate a_file", "it needs an `ajet:` block"),
        ("runs a_file", "a_file: no such folder"),
        ("runs nowhere", "nowhere: no such folder"),
    ],
)
def test_a_file_that_is_empty_or_none_is_told_what_this_command_needs(
    arguments: str, says: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *arguments.split())


def test_a_nul_in_the_yaml(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "run.yaml").write_text(CONFIG + '  experiment_name: "a\\0b"\n')
    assert "run.yaml:6: the text has a NUL character" in refused(capsys, "--conf", "run.yaml")


def test_a_port_that_is_taken(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused(capsys, "--conf", "run.yaml", "--backbone=debug", f"gateway.port={port}")
    assert f"127.0.0.1:{port}: Address already in use. Change gateway.host or gateway.port" in said


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder in which even root can't write."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        if os.geteuid() == 0:
            pytest.skip("needs the right to mount")
        folder.chmod(0o500)
        yield folder
        return
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    "command",
    [
        "--conf run.yaml --backbone=debug --exp-dir PLACE",
        "--conf run.yaml --backbone=debug experiment_dir=PLACE/x",
        "init PLACE/new",
        "store --path PLACE/store.sqlite",
        "rollout --agent react --model tiny:qwen2-0.3m --tasks tasks.jsonl --out PLACE/out",
    ],
)
def test_a_place_that_can_not_be_written(
    command: str, project: Path, read_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(read_only) in refused(capsys, *command.replace("PLACE", str(read_only)).split())


def test_a_state_folder_that_can_not_be_written(
    project: Path, read_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AJET_STATE_DIR", str(read_only / "state"))
    code = main(["--conf", "run.yaml", "--backbone=debug"])
    said = capsys.readouterr().err
    assert code == 2
    assert str(read_only) in said
    assert "set AJET_STATE_DIR to a folder" in said


def test_a_cache_that_can_not_be_written(
    project: Path, read_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AJET_CACHE", str(read_only / "cache"))
    assert "set AJET_CACHE to a folder" in refused(capsys, "--conf", "run.yaml", "--backbone=debug")


def test_half_a_surrogate_pair_in_the_tasks(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "tasks.jsonl").write_text('{"query": "a"}\n{"query": "b", "id": "x\\ud800"}\n')
    said = refused(capsys, "--conf", "run.yaml", "--backbone=debug")
    assert "tasks.jsonl:2: \\ud800 is half of a surrogate pair" in said


def test_validate_takes_a_run_whose_episodes_begin_elsewhere(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "outside.yaml").write_text(
        "ajet: {model: {path: 'tiny:qwen2-0.3m'}, task_runner: {wrapper_type: outside}, "
        "trainer_common: {total_training_steps: 2}}\n"
    )
    assert main(["validate", "outside.yaml"]) == 0
    assert "programs elsewhere begin the episodes" in capsys.readouterr().out
    assert "there is no episode to run here" in refused(capsys, "validate", "outside.yaml", "--run")
