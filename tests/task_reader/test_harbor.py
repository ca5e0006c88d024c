"""Tasks in Harbor's format: read, played by scripted replies in a sandbox, judged by tests that nobody could see."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ajet.backbone.metrics import is_success
from ajet.config import Config, load_config, make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import Reply, ScriptedCall, ScriptedEngine
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import ConfigError, TaskDataError
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
from ajet.task_runner.runtime import Runtime

PAGE = Path(__file__).parents[2] / "docs/tasks.md"
EQUAL = '#!/bin/bash\nif [ "$(cat /app/answer.txt)" = "$(cat /tests/expected.txt)" ]; then r=1; else r=0; fi\n' + (
    "echo $r > /logs/verifier/reward.txt\n"
)
TOML = 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 20\n[environment]\ncpus = 1\n'
BASE = "FROM ubuntu:24.04\nWORKDIR /app\n"


def make_task(root: Path, name: str, test: str = EQUAL, toml: str = TOML, **files: str) -> Path:
    """A task's folder. `files`: more of them, with `__` for a slash and `_dot_` for a dot."""
    folder = root / name
    texts = {"task.toml": toml, "instruction.md": f"This is {name}.\n", "tests/test.sh": test}
    texts["tests/expected.txt"] = "42\n"
    texts |= {path.replace("__", "/").replace("_dot_", "."): text for path, text in files.items()}
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def config_of(root: Path, **more: Any) -> Config:
    return make_config(
        {
            "task_reader.type": "harbor",
            "task_reader.harbor.training_path": str(root),
            "task_judge.judge_type": "harbor",
            "rollout.sandbox": {"kind": "bubblewrap", "memory_mb": 64, "disk_mb": 4, "exec_seconds": 10},
            "rollout.agent": {"type": "coding", "tools": ["bash"], "system_prompt": "Do it."},
            "rollout.max_model_len": 4096,
            **more,
        }
    )


def read(root: Path, **more: Any) -> Any:
    return read_training_tasks(build_reader(config_of(root, **more)))


SOLVES = "echo 42 > answer.txt"
DOES = {
    "solved": SOLVES,
    "wrong": "echo 41 > answer.txt",
    "copied": "cat data.txt > answer.txt",
    "unbuilt": "cat data.txt > answer.txt",
    "partly": SOLVES,
    "named": SOLVES,
    "hidden": "cat /tests/expected.txt > answer.txt; pwd > where.txt",
    "raises": SOLVES,
    "silent": SOLVES,
    "endless": SOLVES,
}


def ten_tasks(root: Path) -> None:
    raises = "#!/usr/bin/env python3\nraise SystemExit('the tests are broken')\n"
    make_task(root, "solved", environment__Dockerfile=BASE)
    make_task(root, "wrong", environment__Dockerfile=BASE)
    copies = f"# a comment\n{BASE}COPY . \\\n  .\n"
    make_task(root, "copied", environment__Dockerfile=copies, environment__data_dot_txt="42\n")
    make_task(root, "unbuilt", toml=TOML + 'memory = "32M"\nstorage = "2M"\n', environment__data_dot_txt="42\n")
    make_task(root, "partly", '#!/bin/sh\necho \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json\n')
    make_task(
        root,
        "named",
        "#!/bin/sh\necho 0 > /logs/verifier/reward.txt; echo '{\"a\": 0.5}' > /logs/verifier/reward.json\n",
    )
    make_task(root, "hidden")
    make_task(root, "raises", raises)
    make_task(root, "silent", "#!/bin/sh\necho all is well\n")
    make_task(root, "endless", "#!/bin/sh\nsleep 600\n", toml=TOML.replace("timeout_sec = 20", "timeout_sec = 0.5"))


def reply(call: ScriptedCall) -> Reply:
    """One command for the task that the prompt names, then the end."""
    name = next(name for name in DOES if f"This is {name}." in call.prompt)
    if call.index:
        return "Done."
    function = {"name": "bash", "arguments": {"command": DOES[name]}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_ten_tasks_are_played_and_judged_by_their_tests(tmp_path: Path) -> None:
    ten_tasks(tmp_path)
    config = config_of(tmp_path)
    tasks = read_training_tasks(build_reader(config))
    assert sorted(task.task_id for task in tasks) == sorted(DOES)
    engine = ScriptedEngine(reply, lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer(), max_model_len=4096)
    with Runtime(config, make_engine=lambda _: engine) as runtime:
        groups = runtime.run(runtime.pool.run_groups(tasks, num_repeat=1))
    played: dict[str, Episode] = {
        episode.task_id: episode for group in groups for episode in (*group.episodes, *group.failed)
    }
    rewards = {name: episode.reward for name, episode in played.items() if episode.failure is None}
    assert rewards == {"solved": 1, "wrong": 0, "copied": 1, "unbuilt": 1, "partly": 0.25, "named": 0.5, "hidden": 0}
    assert {name for name, episode in played.items() if is_success(episode)} == {"solved", "copied", "unbuilt"}
    assert played["partly"].metadata["judge"]["tests"]["rewards"] == {"reward": 0.25, "style": 1}
    for name, why in {
        "raises": "the tests are broken",
        "silent": "wrote neither /logs/verifier/reward.txt nor reward.json: all is well",
        "endless": "did not end within 0.5 s (verifier.timeout_sec)",
    }.items():
        failure = played[name].failure
        assert played[name].status is EpisodeStatus.JUDGE_ERROR and played[name].reward is None
        assert failure is not None and why in failure.in_short


def test_what_a_task_says_becomes_its_sandbox(tmp_path: Path) -> None:
    more = 'memory_mb = 2048\nstorage = "1G"\nworkdir = "/home/me"\nenv = {A = "1"}\n'
    make_task(tmp_path, "one", toml=TOML + more, environment__Dockerfile=BASE)
    (task,) = read(tmp_path / "one")
    assert task.main_query == "This is one." and "folder" not in task.metadata
    sandbox = {"workspace": "/home/me", "cpus": 1.0, "memory_mb": 2048, "disk_mb": 1024, "environment": {"A": "1"}}
    assert task.metadata["sandbox"] == sandbox
    assert task.metadata["verifier"] == {"folder": str(tmp_path / "one/tests"), "seconds": 20.0, "env": {}}


def test_what_is_not_followed_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = "gpus = 1\nallow_internet = false\n[agent]\ntimeout_sec = 99999\nuser = 'me'\n[solution]\nenv = {A = '1'}\n"
    for name in ("one", "two"):
        make_task(tmp_path, name, toml=TOML + more)
    with caplog.at_level(logging.WARNING):
        read(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if "not followed" in record.getMessage()]
    assert line == (
        f"{tmp_path}: 2 tasks; not followed in task.toml: agent.timeout_sec: 99999 (ajet.rollout.episode_timeout is "
        "1200), agent.user (2 ×), environment.gpus (2 ×)"
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"task.toml": "[verifier"}, r"one/task\.toml is not TOML: Expected"),
        ({"task.toml": "[verifier]\ntimeout_sec = 'soon'"}, r"toml: verifier\.timeout_sec: expected a number above"),
        ({"task.toml": "[environment]\nmemory = 'much'"}, r"environment\.memory: expected a size such as 512M or 4G"),
        ({"task.toml": "[environment]\nenv = {KEY = '${KEY}'}"}, r"environment\.env: .*KEY would be taken from this"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "a task of several steps can't be played"),
        ({"environment/docker-compose.yaml": ""}, r"docker-compose\.yaml: a task of several containers"),
        ({"environment/Dockerfile": f"{BASE}RUN x\n"}, r"Dockerfile: the task needs an image(.|\n)*RUN x"),
        ({"task.toml": "[environment]\ndocker_image = 'x:1'"}, r"toml: the task needs an image(.|\n)*kind: docker"),
        ({"tests/test.sh": None}, r"one/tests/test\.sh is missing"),
        ({"instruction.md": None}, r"one/instruction\.md is missing"),
        ({"task.toml": None}, r"one/task\.toml: No such file"),
    ],
)  # fmt: skip
def test_a_malformed_folder_is_an_error_that_names_file_and_key(
    tmp_path: Path, files: dict[str, str | None], said: str
) -> None:
    folder = make_task(tmp_path, "one")
    (folder / "environment").mkdir()
    for path, text in files.items():
        if text is None:
            (folder / path).unlink()
        else:
            (folder / path).write_text(text)
    with pytest.raises(TaskDataError, match=said):
        read(tmp_path)


def test_with_containers_an_image_must_have_been_built(tmp_path: Path) -> None:
    folder = make_task(tmp_path, "One", environment__Dockerfile=f"{BASE}RUN apt-get install x\n")
    docker = {"rollout.sandbox": {"kind": "docker", "image": "ubuntu:24.04"}}
    with pytest.raises(TaskDataError, match=r"has not been built: docker build -t harbor-one "):
        read(tmp_path, **docker)
    (folder / "task.toml").write_text(f'{TOML}docker_image = "harbor-one"\n')
    (task,) = read(tmp_path, **docker)
    assert task.metadata["sandbox"] == {"workspace": "/app", "image": "harbor-one", "cpus": 1.0}


def test_a_run_without_sandbox_or_judge_is_refused(tmp_path: Path) -> None:
    make_task(tmp_path, "one")
    with pytest.raises(ConfigError, match=r"set ajet\.task_judge\.judge_type: harbor"):
        read(tmp_path, **{"task_judge.judge_type": "customized_protocol"})
    with pytest.raises(ConfigError, match=r"ajet\.rollout\.sandbox is none: "):
        read(tmp_path, **{"rollout.sandbox": {"kind": "none", "network": "host"}})
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskDataError, match=r"empty contains no tasks: expected folders with task\.toml"):
        read(tmp_path / "empty")


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE.read_text().split("## Harbor's task folders")[1].split("\n## ")[0]
    code = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[0]
    folder = make_task(tmp_path / "tasks", "count-lines")
    make_task(tmp_path / "held_out", "other")
    (tmp_path / "my.yaml").write_text(code)
    monkeypatch.chdir(tmp_path)
    reader = build_reader(load_config("my.yaml", backbone="debug"))
    assert [task.task_id for task in read_training_tasks(reader)] == ["count-lines"]
    assert [task.task_id for task in read_validation_tasks(reader)] == ["other"]
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 'soon'")
    with pytest.raises(TaskDataError) as raised:
        read_training_tasks(reader)
    assert f"error: {raised.value}".replace(f"{tmp_path}/", "") in section
