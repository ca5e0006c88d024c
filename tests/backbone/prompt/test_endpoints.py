"""A search whose model and proposer are at endpoints: real servers, and ones that are dead, slow or talk nonsense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.cli.main import main
from ajet.observe.episode_store import EpisodeStore
from support.scripted_helper import helper
from support.searchers import project

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """`ajet serve`, with a key: a server that speaks messages and tells no token ids."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ajet", "serve", "tiny:qwen2-0.3m", "--port", "0", "--api-key", "sk-right"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None
        line = next(line for line in run.stdout if " at http" in line)
        yield line.split(" at ")[1].split()[0]
        run.terminate()


def remote(url: str, key: str = "sk-right") -> dict[str, Any]:
    server = {"base_url": url, "model": "any", "api_key": key, "max_attempts": 2}
    return {"rollout__engine": "remote", "rollout__remote": server, "prompt_tuning__rounds": 1}


@pytest.mark.slow
def test_a_search_over_an_endpoint_reads_transcripts_and_counts_tokens(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    conf = project(tmp_path, tasks=8, **remote(served), prompt_tuning__budget={"tokens": 100_000})
    assert main(["--conf", str(conf), "--backbone=prompt"]) == 0, capsys.readouterr()
    folder = tmp_path / "saved_experiments/x-prompt"
    history = [json.loads(line) for line in (folder / "prompts/history.jsonl").read_text().splitlines()]
    spent = history[-1]["spent"]
    assert spent["prompt_tokens"] > 0 and spent["sampled_tokens"] == 4 * spent["episodes"]
    assert f"{spent['tokens']:,} tokens" in capsys.readouterr().out
    store = EpisodeStore(folder / "episodes.sqlite")
    try:
        for one in store.all():
            (call,) = one.episode.tree.calls
            assert call.new_messages[0]["content"].startswith("Solve: Task") and call.reply["content"]
            assert (call.reply_tokens, call.trainable) == (4, False)
    finally:
        store.close()


@pytest.mark.slow
def test_the_model_at_the_endpoint_may_write_the_proposals(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model can't: it is asked, counted and refused."""
    monkeypatch.chdir(tmp_path)
    keys = {**remote(served), "prompt_tuning__proposer": "tuned", "prompt_tuning__proposal_retries": 0}
    assert main(["--conf", str(project(tmp_path, tasks=8, **keys)), "--backbone=prompt", "--quiet"]) == 1
    history = (tmp_path / "saved_experiments/x-prompt/prompts/history.jsonl").read_text().splitlines()
    spent = json.loads(history[-1])["spent"]
    assert spent["questions"] == 4 and spent["proposer_prompt_tokens"] > 100 and spent["proposer_sampled_tokens"] > 0


@pytest.mark.parametrize(("key", "why"), [("sk-wrong", "wrong API key (check rollout.remote.api_key)")])
def test_a_wrong_key_is_one_line(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--conf", str(project(tmp_path, tasks=8, **remote(served, key))), "--backbone=prompt"]) == 2
    said = capsys.readouterr().err
    assert why in said and "Traceback" not in said


ASIDE = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (lambda text: (400, {}, {"error": {"message": "no such model"}}), "no such model"),
        (lambda text: (200, {}, ASIDE), "questions to the proposer failed"),
        (lambda text: "Let me think about this.", "lacks the placeholder {question}"),
        (lambda text: "", "refused    "),
    ],
    ids=["refuses", "no choices", "nonsense", "empty"],
)
def test_a_helper_that_is_no_use_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: Any,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with helper(lambda text: answers(text)) as server:
        keys = {"model": "m", "base_url": server.url, "api_key": "k"}
        conf = project(tmp_path, tasks=8, helper=keys, prompt_tuning__proposer="helper")
        assert main(["--conf", str(conf), "--backbone=prompt"]) == 1
    said = "".join(capsys.readouterr())
    assert why in said and "Traceback" not in said


def test_a_helper_that_never_answers_ends_the_search_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its connections stay open and nothing comes. With a longer timeout, the same command goes on."""
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    answers, over = threading.Event(), threading.Event()

    def answer(text: str) -> str:
        if not answers.is_set():
            over.wait()
        asked.append(text)
        return f'<template name="solver">Check {len(asked)}: {{question}}</template>'

    with helper(answer) as server:
        keys = {"model": "m", "base_url": server.url, "api_key": "k"}
        conf = str(project(tmp_path, tasks=8, helper=keys, prompt_tuning__proposer="helper"))
        search = ["--conf", conf, "--backbone=prompt", "prompt_tuning.rounds=1"]
        try:
            assert main([*search, "prompt_tuning.proposer_timeout=0.5"]) == 1
            why = (
                "round 1: all 4 questions to the proposer failed. The last: the proposer failed: no answer within 0.5 s"
            )
            assert why in capsys.readouterr().err
            answers.set()
            assert main([*search, "prompt_tuning.proposer_timeout=120"]) == 0
            assert len(asked) == 4
        finally:
            over.set()
    said = capsys.readouterr().out
    assert "4 new" in said and "start:" not in said, "the start was validated once"


@pytest.mark.slow
def test_a_helper_that_answers_some_questions_too_late_loses_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    over = threading.Event()

    def answer(text: str) -> str:
        asked.append(text)
        if len(asked) == 2:
            over.wait()
        return f'<template name="solver">Check {len(asked)}: {{question}}</template>'

    with helper(answer) as server:
        keys = {"model": "m", "base_url": server.url, "api_key": "k"}
        conf = str(project(tmp_path, tasks=8, helper=keys, prompt_tuning__proposer="helper"))
        try:
            code = main(
                ["--conf", conf, "--backbone=prompt", "prompt_tuning.rounds=1", "prompt_tuning.proposer_timeout=3"]
            )
        finally:
            over.set()
    assert code == 0
    assert "3 new, 1 refused" in capsys.readouterr().out


def test_a_helper_that_ends_in_the_middle_leaves_the_complete_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def answer(text: str) -> Any:
        asked.append(text)
        if len(asked) > 4:
            return 400, {}, {"error": {"message": "the credit is used up"}}
        return f'<template name="solver">Check {len(asked)}: {{question}}</template>'

    with helper(answer) as server:
        keys = {"model": "m", "base_url": server.url, "api_key": "k"}
        conf = project(tmp_path, tasks=8, helper=keys, prompt_tuning__proposer="helper")
        assert main(["--conf", str(conf), "--backbone=prompt"]) == 1
    said = capsys.readouterr()
    assert "round 2: all 4 questions to the proposer failed" in said.err and "the credit is used up" in said.err
    history = (tmp_path / "saved_experiments/x-prompt/prompts/history.jsonl").read_text()
    assert history.count('"event": "round"') == 2, "the start and round 1"
    assert (tmp_path / "saved_experiments/x-prompt/prompts/best.yaml").exists()
