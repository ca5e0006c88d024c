"""Learning to ask: the reward, the rules in the helper's place over a real socket, the data, and runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.schema.episode import EpisodeStatus
from ajet.schema.task import Task
from ajet.task_judge.helper_answers import WrongAnswer
from support.tutorial_runs import ROOT, TUTORIAL, debug, imports, play, train

CONF = "example_learning_to_ask/learning_to_ask.yaml"
FOLDER = TUTORIAL / "example_learning_to_ask"


@pytest.fixture
def files() -> Iterator[Any]:
    with imports("example_learning_to_ask"), imports("."):
        import ask_judge
        import helper_endpoint
        import make_data
        import process
        import rule_judge

        modules = {"ask_judge": ask_judge, "endpoint": helper_endpoint, "make_data": make_data}
        yield type("Files", (), {**modules, "process": process, "rule_judge": rule_judge})


@pytest.fixture
def rules(files: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The rules at a port of their own; their base URL."""
    server = files.endpoint.make_server(files.rule_judge.answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    port = server.server_address[1]
    monkeypatch.setenv("RULE_JUDGE_PORT", str(port))
    yield f"http://127.0.0.1:{port}/v1"
    server.shutdown()
    server.server_close()


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "data" / f"{split}.jsonl").read_text().splitlines()]


def test_the_shipped_sessions_are_what_their_script_makes(files: Any, tmp_path: Path) -> None:
    files.make_data.write(tmp_path, 5)
    for made in tmp_path.iterdir():
        assert made.read_text() == (FOLDER / "data" / made.name).read_text(), made.name


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_shipped_tasks_are_what_the_sessions_give(rules: str, tmp_path: Path, split: str) -> None:
    origin = tmp_path / f"{split}_origin.jsonl"
    shutil.copy(FOLDER / "data" / origin.name, origin)
    command = [sys.executable, str(FOLDER / "process.py"), str(origin), "--base-url", rules, "--model", "rules"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / f"{split}.jsonl").read_text() == (FOLDER / "data" / f"{split}.jsonl").read_text()
    # what was extracted is not asked again, so that no endpoint is needed
    command[4] = "http://127.0.0.1:9/v1"
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_damaged_session_is_named(files: Any, tmp_path: Path) -> None:
    (tmp_path / "x_origin.jsonl").write_text('{"session_id": 1, "messages": []}\n{"session_id": 2}\n')
    with pytest.raises(files.process.BadSession, match=r"x_origin\.jsonl:2: expected"):
        files.process.read_sessions(tmp_path / "x_origin.jsonl")


@pytest.mark.parametrize(
    ("reply", "wanted", "points"),
    [
        ("Since when: today or longer?", 4.0, {"action": 1, "content": 2, "format": 1}),
        ("A fever: yes or no? Since when: today or longer?", 1.5, {"action": 1, "content": 0, "format": 0.5}),
        ("Anything else?", 2.2, {"action": 1, "content": 0.2, "format": 1}),
        ("Any pain: yes or no?", 2.0, {"action": 1, "content": 0, "format": 1}),
        ("hm", 1.0, {"action": 1, "content": 0, "format": 0}),
        ("<stop />", 0.0, {"action": 0, "content": 0, "format": 0}),
    ],
)
def test_the_reward_of_a_question(
    monkeypatch: pytest.MonkeyPatch, rules: str, reply: str, wanted: float, points: dict[str, float]
) -> None:
    messages = [{"role": "user", "content": "My ear is red. No fever. It is a pain."}]
    truth = {"decision_truth": "continue", "info_truth": ["duration"]}
    task = Task(task_id="t", main_query="x", init_messages=messages, metadata=truth)
    episode = play(monkeypatch, CONF, task, [reply])
    assert episode.failure is None, episode.failure
    # 1 + 2 · content + format
    assert episode.reward == pytest.approx(points["action"] + points["content"] + points["format"])
    assert episode.is_success == (wanted == 4.0)
    if "fever" not in reply:
        assert episode.reward == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("reply", "wanted"), [("<stop />", 4.0), ("Enough. <stop />", 3.0), ("A fever: yes or no?", 0.0)]
)
def test_the_reward_of_a_stop(monkeypatch: pytest.MonkeyPatch, rules: str, reply: str, wanted: float) -> None:
    row = next(row for row in rows("test") if row["metadata"]["decision_truth"] == "stop")
    task = Task(task_id="t", main_query="x", init_messages=row["init_messages"], metadata=row["metadata"])
    assert play(monkeypatch, CONF, task, [reply]).reward == wanted


FORM = "<format_score>1</format_score>"


@pytest.mark.parametrize("answer", ["", "1", FORM, f"{FORM}<content_score>7</content_score>"])
def test_an_answer_without_scores_is_no_score(files: Any, answer: str) -> None:
    with pytest.raises(WrongAnswer):
        files.ask_judge.read_scores(answer)
    thought = (
        "<think><content_score>0</content_score></think><format_score>.5</format_score><content_score>1</content_score>"
    )
    assert files.ask_judge.read_scores(thought) == (1.0, 0.5)


def test_a_judge_without_a_helper_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RULE_JUDGE_PORT", str(closed.getsockname()[1]))
    monkeypatch.setattr("ajet.task_judge.helper.MAX_RETRIES", 0)
    row = next(row for row in rows("test") if row["metadata"]["decision_truth"] == "continue")
    task = Task(task_id="t", main_query="x", init_messages=row["init_messages"], metadata=row["metadata"])
    episode = play(monkeypatch, CONF, task, ["A fever: yes or no?"], "rollout.episode_retries=0")
    assert episode.reward is None and episode.failure is not None
    assert episode.status is EpisodeStatus.JUDGE_ERROR


def test_the_rules_refuse_what_they_do_not_know(rules: str) -> None:
    def ask(body: bytes) -> int:
        request = urllib.request.Request(f"{rules}/chat/completions", data=body)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert ask(b'{"messages": [{"role": "user", "content": "What is the weather?"}]}') == 400
    assert ask(b'{"messages": []}') == ask(b"[]") == ask(b"nonsense") == 400


@pytest.mark.slow
def test_on_debug_and_two_steps_on_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run starts the rules by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RULE_JUDGE_PORT", str(probe.getsockname()[1]))
    short = ["rollout.max_response_length_in_one_turn=8"]
    episodes = debug(monkeypatch, CONF, tmp_path / "debug", *short)
    assert len(episodes) == 2 and all(0 <= (episode.reward or 0) <= 4 for episode in episodes)
    steps = train(monkeypatch, CONF, tmp_path / "local", *short)
    assert all(re.match("reward/", name) is None or value is not None for step in steps for name, value in step.items())
