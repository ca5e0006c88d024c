"""A workflow that asks another model than the tuned one ends its run at once, with the line to change."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.backbone import LaunchOptions
from ajet.backbone.failures import ModelCallWatch, warn_of
from ajet.backbone.local import run
from ajet.backbone.ray.collector import EpisodeCollector, GroupRunner
from ajet.backbone.ray.facts import EPISODE_METRICS, RunError, RunPayload
from ajet.config import make_config
from ajet.config.loader import load_config
from ajet.context_tracker import TrackerSettings
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.logs import LOST
from ajet.observe.metrics import read_metrics
from ajet.schema.episode import CallTree, Episode, EpisodeGroup, EpisodeStatus, Failure, Ledger
from ajet.schema.errors import NoModelCallError
from ajet.schema.task import Task
from ajet.task_judge.helper import HelperMeter, HelperModel
from support import in_process
from support.episodes import LINEAR, make_groups

OWN = """
from openai import AsyncOpenAI
from ajet import Workflow, WorkflowOutput

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        own = AsyncOpenAI()
        client = own if workflow_task.task_thread_index % 2 or not {some} else tuner.as_raw_openai_sdk_client()
        messages = [{{"role": "user", "content": workflow_task.task.main_query}}]
        await client.chat.completions.create(model="gpt", messages=messages)
        return WorkflowOutput(reward=float(workflow_task.task_thread_index))
"""
CONFIG = """
ajet:
  experiment_name: job
  model: {path: "tiny:qwen2"}
  task_reader: {jsonl_dataset_file: {training: {file_path: tasks.jsonl}}}
  rollout:
    user_workflow: agent.py->Agent
    num_repeat: 2
    max_response_length_in_one_turn: 4
    compute_madness_checklist: []
  data: {train_batch_size: 2, max_prompt_length: 64, max_response_length: 64}
  trainer_common: {total_training_steps: 2, save_freq: 0, test_freq: 0}
"""


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The model that `AsyncOpenAI()` asks by default: what it was asked for."""
    asked: list[str] = []

    class Provider(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["content-length"])).decode())
            message = {"role": "assistant", "content": "4"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = json.dumps(
                {"id": "x", "object": "chat.completion", "created": 0, "model": "gpt", "choices": [choice]}
            )
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
        yield asked
        server.shutdown()
        thread.join()


def project(folder: Path, *, some: bool = False) -> Path:
    """`some`: the other half of the episodes uses the tuner's client."""
    (folder / "agent.py").write_text(OWN.format(some=some))
    lines = [{"task_id": f"t{index}", "main_query": f"{index} + 1"} for index in range(2)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "job.yaml").write_text(CONFIG)
    return folder / "job.yaml"


def train(yaml: Path) -> Path:
    config = load_config(yaml, [], backbone="local")
    with ExperimentFolder.open(config, exp_dir=yaml.parent / "runs", source_yaml=yaml) as experiment:
        run(config, experiment, LaunchOptions(quiet=True))
        return experiment.path


OWN_LINE = r"agent\.py:7, instead of `own = AsyncOpenAI\(\)`, write tuner\.as_raw_openai_sdk_client\(\)"


@pytest.mark.slow
def test_a_client_of_its_own_ends_the_run_after_the_first_step(
    tmp_path: Path, provider: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = r"(?s)no model call was recorded: 4 of the 4 episodes of step 1 .*use the tuner's client: .*"
    with pytest.raises(NoModelCallError, match=rf"(?i){said}{OWN_LINE}"):
        train(project(tmp_path))
    assert len(provider) == 4, "no second step was paid for"


@pytest.mark.slow
def test_how_many_asked_another_model_is_said_if_some_did_not(
    tmp_path: Path, provider: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = read_metrics(train(project(tmp_path, some=True)) / "metrics.jsonl")
    assert [step["episode/without_calls"] for step in steps] == [2, 2] and len(provider) == 4
    said = [line for line in caplog.messages if "made no model call that was recorded" in line]
    assert len(said) == 2 and "2 of 4 episodes of step 1" in said[0]


def test_a_client_of_another_episode_is_named_as_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    warn_of(1, {"episode/without_calls": 6, "episode/count": 12})
    assert "6 of 12 episodes of step 1" in caplog.text and "with another episode's" in caplog.text


@pytest.mark.slow
def test_a_debug_run_shows_the_episodes_and_ends_with_the_line(tmp_path: Path, provider: list[str]) -> None:
    done = in_process.ajet(tmp_path, "--conf", str(project(tmp_path)), "--backbone=debug")
    assert done.returncode == 2
    assert "task t0" in done.stdout and "no model call was recorded" in done.stderr
    assert "agent.py:7, instead of `own = AsyncOpenAI()`" in done.stderr and "Traceback" not in done.stderr


def silent(count: int = 1) -> list[Episode]:
    return [Episode("e", "t", EpisodeStatus.COMPLETED, CallTree(), Ledger(), reward=1.0) for _ in range(count)]


def test_on_ray_the_collector_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = project(tmp_path)
    config = load_config(yaml, [], backbone="verl")
    reports = str(tmp_path)
    run = RunPayload(config.model_dump(mode="json"), reports, str(yaml), "tiny:qwen2", reports, reports=reports)

    async def first_step() -> str | None:
        collector = EpisodeCollector(run.encode())
        await collector.add("g", EpisodeGroup("g", "t", silent(2)), Task(task_id="t"), {"helper/calls": 2.0})
        await collector.end_step(1, ["g"], [], False)
        await collector.add("v", EpisodeGroup("v", "t", silent(1)), Task(task_id="t"), {"helper/calls": 1.0})
        await collector.end_validation(1, "v")
        return await collector.failure()

    reason = asyncio.run(first_step()) or ""
    assert RunError.read(tmp_path) == RunError(reason, users=True)
    lines = [json.loads(line)["data"] for line in (tmp_path / EPISODE_METRICS).read_text().splitlines()]
    assert lines[0]["episode/without_calls"] == 2
    assert [line["helper/calls"] for line in lines] == [2, 3], "a step's, and with its validation's"
    assert reason.startswith("no model call was recorded: 2 of the 2 episodes of step 1")
    assert "own = AsyncOpenAI()" in reason and "\n" not in reason


def test_on_ray_a_validation_that_is_made_up_for_adds_to_what_its_step_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = project(tmp_path)
    given = load_config(yaml, [], backbone="verl").model_dump(mode="json")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "helper/calls": 2.0}\n')
    folder = str(tmp_path)
    run = RunPayload(given, folder, str(yaml), "tiny:qwen2", folder, folder, resumed_step=3, lacks_validation=True)

    async def validation() -> None:
        collector = EpisodeCollector(run.encode())
        await collector.add("v", EpisodeGroup("v", "t", silent(1)), Task(task_id="t"), {"helper/calls": 1.0})
        await collector.end_validation(3, "v")
        await collector.close()

    asyncio.run(validation())
    assert json.loads((tmp_path / EPISODE_METRICS).read_text())["data"]["helper/calls"] == 3


def test_on_ray_the_recording_is_closed_at_the_end_and_what_it_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = project(tmp_path)
    config = load_config(yaml, [], backbone="verl")
    reports = str(tmp_path)
    run = RunPayload(config.model_dump(mode="json"), reports, str(yaml), "tiny:qwen2", reports, reports=reports)

    async def ended(disk: str) -> None:
        collector = EpisodeCollector(run.encode())
        if disk == "full":
            monkeypatch.setattr("ajet.observe.recorder.insert_episode", full)
        await collector.add("g", EpisodeGroup("g", "t", silent(2)), Task(task_id="t"), {})
        await collector.end_step(1, ["g"], [], False)
        await collector.close()

    def full(*_: Any) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    asyncio.run(ended("free"))
    assert not (tmp_path / "episodes.sqlite-wal").exists()
    assert not any(hasattr(record, LOST) for record in caplog.records)
    asyncio.run(ended("full"))
    (told,) = [record for record in caplog.records if hasattr(record, LOST)]
    assert "episodes.sqlite lacks " in told.getMessage()


def test_on_ray_a_group_brings_what_it_asked_of_the_helper_and_tokens_that_rows_have_no_room_for() -> None:
    """The tree that was sampled has them all."""
    (episodes,) = make_groups(LINEAR, groups=1, size=3)
    group = EpisodeGroup("g", "t", episodes)
    added: list[EpisodeGroup] = []
    helper = HelperModel.from_config(config := make_config({"data.max_response_length": 9, "helper.model": "judge"}))

    async def add(uid: str, group: EpisodeGroup, task: Task, asked: dict[str, float]) -> None:
        added.append(group)
        assert asked == {"helper/calls": 1.0}

    ended: Future[EpisodeGroup] = Future()
    ended.set_result(group)
    runtime = SimpleNamespace(submit=lambda _: ended, pool=SimpleNamespace(run_group=lambda *_, **__: None))
    runner: Any = object.__new__(GroupRunner)
    runner.collector = SimpleNamespace(add=SimpleNamespace(remote=add))
    runner._tracker_settings = TrackerSettings.from_config(config)
    runner._helper = HelperMeter(config)
    helper.budget.take_call()

    async def run_group() -> None:
        runner._opening = asyncio.ensure_future(asyncio.sleep(0, runtime))
        await runner.run_group(Task(task_id="t"))

    asyncio.run(run_group())
    for episode in added[0].episodes:
        (row,) = runner.samples(episode)
        assert episode.ledger.trained == row.response_mask.sum() < episode.tree.trained_tokens
        assert episode.ledger.dropped == {"response_too_long": episode.tree.trained_tokens - episode.ledger.trained}


def watch(folder: Path, source: str) -> ModelCallWatch:
    agent = "class Agent(Workflow):\n    def execute(self, workflow_task, tuner): ...\n"
    (folder / "agent.py").write_text(f"from ajet import Workflow\n{source}\n{agent}")
    return ModelCallWatch(make_config({"rollout.user_workflow": f"{folder / 'agent.py'}->Agent"}))


@pytest.mark.parametrize("line", ["a = langchain.ChatOpenAI(model='gpt')", "b = litellm.completion(model='gpt')"])
def test_the_line_that_makes_a_client_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(NoModelCallError) as raised:
        watch(tmp_path, f"def ask():\n    {line}").look_at("step 1", silent())
    assert f"agent.py:3, instead of `{line}`, write tuner." in str(raised.value)


def test_without_such_a_line_the_tuner_s_clients_are_named(tmp_path: Path) -> None:
    with pytest.raises(NoModelCallError, match=r"Use the tuner's client: tuner\.as_raw_openai_sdk_client\(\), as_"):
        watch(tmp_path, "def ask(tuner):\n    return tuner.as_raw_openai_sdk_client()").look_at("step 1", silent())


def test_a_client_of_the_tuner_s_endpoint_is_no_line_to_change(tmp_path: Path) -> None:
    source = "def ask(tuner):\n    api = tuner.as_oai_baseurl_apikey()\n    return AsyncOpenAI(base_url=api.base_url)"
    with pytest.raises(NoModelCallError, match=r"Use the tuner's client: tuner\.as_raw_openai_sdk_client\(\), as_"):
        watch(tmp_path, source).look_at("step 1", silent())


def test_episodes_that_failed_before_their_first_call_say_so_themselves(tmp_path: Path) -> None:
    failed = Episode("f", "t", EpisodeStatus.WORKFLOW_ERROR, CallTree(), Ledger(), failure=Failure("KeyError", "mine"))
    looking = watch(tmp_path, "")
    looking.look_at("step 1", [failed, failed])
    with pytest.raises(NoModelCallError, match="1 of the 3 episodes of step 2"):
        looking.look_at("step 2", [failed, failed, *silent()])
