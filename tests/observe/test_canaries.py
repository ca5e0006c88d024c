"""Secrets planted in every place that a run reads from: none is in a file, a page, an export, a log or an error."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages_of_viewer import signed_in

CANARY = "canary3f9a1c77d2"
PLACES = (
    "yaml-api-key", "yaml-openai-key", "yaml-my-pwd", "yaml-sas", "yaml-url", "yaml-header", "environment",
    "environment-pwd", "task-metadata", "output-metadata", "nested-metadata", "log-metrics", "exception", "span",
)  # fmt: skip
SECRET = {place: f"{CANARY}-{place}" for place in PLACES}

YAML = """
ajet:
  experiment_name: planted
  backbone: debug
  model: {{path: "tiny:qwen2"}}
  rollout: {{engine: scripted, scripted_replies: replies.yaml, user_workflow: workflow.py->Planted, num_repeat: 2}}
  data: {{train_batch_size: 2}}
  debug: {{debug_first_n_tasks: 2}}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {{training: {{file_path: tasks.jsonl}}}}
judge_service:
  api_key: {yaml-api-key}
  OPENAI_KEY: {yaml-openai-key}
  my_pwd: {yaml-my-pwd}
  sas: {yaml-sas}
  url: https://me:{yaml-url}@127.0.0.1:9/
  headers: {{authorization: "Bearer {yaml-header}"}}
"""

WORKFLOW = """
import json, logging, os
from ajet import Workflow, WorkflowOutput
from ajet.observe.tracing import emitters

SECRETS = json.loads(os.environ["PLANTED_PLACES"])  # a name that says nothing, as if a service had given them

class Planted(Workflow):
    async def execute(self, task, tuner):
        service = tuner.config.judge_service
        known = [service.api_key, service.OPENAI_KEY, service.my_pwd, service.sas, os.environ["MY_KEY"]]
        logging.getLogger("ajet.mine").warning("keys: %s", known)
        with operation("look", password=SECRETS["span"], text=service.my_pwd):
            pass
        if task.task_id == "bad":
            raise RuntimeError(f"no answer from {service.url} with {service.api_key} and {os.environ['DB_PWD']}")
        return WorkflowOutput(
            reward=1.0,
            metadata={
                "api_key": SECRETS["output-metadata"], "said": known, "deep": [{"password": SECRETS["nested-metadata"]}]
            },
            log_metrics={"score": 1.0, "access_token": SECRETS["log-metrics"], "key_of_service": service.OPENAI_KEY},
        )
"""


def planted(folder: Path) -> dict[str, str]:
    """A project with the secrets, and its environment."""
    (folder / "run.yaml").write_text(YAML.format(**SECRET))
    (folder / "replies.yaml").write_text("- hi\n")
    (folder / "workflow.py").write_text(WORKFLOW)
    tasks = [{"id": name, "query": "?", "metadata": {"password": SECRET["task-metadata"]}} for name in ("good", "bad")]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return {
        **os.environ,
        "MY_KEY": SECRET["environment"],
        "DB_PWD": SECRET["environment-pwd"],
        "PLANTED_PLACES": json.dumps(SECRET),
        "COLUMNS": "200",
    }


def found(text: bytes | str) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    return [place for place, secret in SECRET.items() if secret.encode() in data]


def ajet(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "ajet", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_no_canary_is_written_printed_or_served(tmp_path: Path) -> None:
    environment = planted(tmp_path)
    run = ajet(tmp_path, environment, "--conf", "run.yaml")
    folder = tmp_path / "saved_experiments" / "planted-debug"
    assert (folder / "episodes.sqlite").exists(), run.stderr.decode()
    shown = {"terminal": run.stdout + run.stderr}
    for file in folder.rglob("*"):
        if file.is_file():
            shown[str(file.relative_to(folder))] = file.read_bytes()
    for command in (
        ("report", "planted-debug"),
        ("export", "episodes", "planted-debug"),
        ("config", "show", "run.yaml"),
    ):
        said = ajet(tmp_path, environment, *command)
        assert said.returncode == 0, said.stderr.decode()
        shown[" ".join(command)] = said.stdout + said.stderr
    for file in tmp_path.glob("*"):
        if file.is_file() and file.name not in ("run.yaml", "workflow.py", "tasks.jsonl"):
            shown[file.name] = file.read_bytes()
    visitor = signed_in(tmp_path / "saved_experiments")
    root = "/api/x/planted-debug"
    episodes = sqlite3.connect(folder / "episodes.sqlite").execute("SELECT episode_id FROM episode").fetchall()
    assert len(episodes) == 2
    pages = ("", *(f"/{page}{csv}" for page in ("metrics", "episodes", "tasks") for csv in ("", ".csv")), "/facets")
    paths = ["/", "/x/planted-debug", "/api/experiments", *(root + page for page in pages)]
    paths += [f"{root}/task/{task}" for task in ("good", "bad")]
    paths += [f"{root}/{what}/{episode}" for (episode,) in episodes for what in ("episode", "raw", "tokens")]
    for path in paths:
        answer = visitor.get(path)
        assert answer.status_code == 200, path
        shown[path] = answer.content
    assert {place: secrets for place, text in shown.items() if (secrets := found(text))} == {}


@pytest.mark.parametrize(
    "wrong",
    [
        "ajet: {rollout: {num_repeat: '${oc.env:MY_KEY}'}}",
        "ajet: {rollout: {engine: '${oc.env:DB_PWD}'}}",
        "ajet: {model: {path: '/no/such/${oc.env:MY_KEY}'}, rollout: {num_repeat: -1}}",
        "ajet: {helper: {api_key: {a: 'yaml-api-key'}}}",
    ],
)
def test_errors_in_a_config_show_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    from ajet.config import load_config
    from ajet.schema.errors import ConfigError

    monkeypatch.setenv("MY_KEY", SECRET["environment"])
    monkeypatch.setenv("DB_PWD", SECRET["environment-pwd"])
    (tmp_path / "x.yaml").write_text(wrong.replace("yaml-api-key", SECRET["yaml-api-key"]))
    with pytest.raises(ConfigError) as raised:
        load_config(str(tmp_path / "x.yaml"), [f"helper.api_key={SECRET['yaml-header']}", "rollout.temperature=-1"])
    assert found(str(raised.value)) == []
