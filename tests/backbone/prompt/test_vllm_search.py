"""A search whose episodes run on vLLM's servers, by the command and the YAML, as a user starts it.

With AJET_VLLM_PYTHON, `make test-vllm`, it is the real vLLM; else `torch_vllm_server.py` stands in its place, for one
search.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ajet.backbone.prompt.journal import read_best
from ajet.engine.vllm.server import SERVER_MODULE
from ajet.observe.episode_store import EpisodeStore
from support.searchers import project
from support.torch_vllm_server import vllm_python
from support.waiting import wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("AJET_VLLM_PYTHON", "")
real_alone = pytest.mark.skipif(not PYTHON, reason="takes minutes: run `make test-vllm`")


def start(folder: Path, algorithm: str, **keys: Any) -> subprocess.Popen[str]:
    """`ajet --conf x.yaml --backbone=prompt` with vLLM as engine."""
    # a restart takes as long as the machine is busy, and episodes wait for it
    vllm = {"python": PYTHON or str(vllm_python(folder)), "start_timeout": 3600}
    engine = {"rollout__engine": "vllm", "rollout__vllm": vllm, "rollout__episode_retries": 3}
    engine["rollout__episode_timeout"] = 7200
    conf = project(folder, algorithm=algorithm, **engine, **keys)
    command = [sys.executable, "-m", "ajet", "--conf", str(conf), "--backbone=prompt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def servers(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return [one for one in psutil.Process(run.pid).children() if SERVER_MODULE in one.cmdline()]


def history(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "saved_experiments/x-prompt/prompts/history.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("algorithm", ["apo", pytest.param("gepa", marks=real_alone)])
def test_a_search_over_vllm_survives_the_death_of_its_server(tmp_path: Path, algorithm: str) -> None:
    """SIGKILL between two rounds. Nothing is lost: every task of every candidate has its score."""
    run = start(tmp_path, algorithm, prompt_tuning__rounds=3, prompt_tuning__gepa={"merges": 0})
    assert run.stdout is not None
    said: list[str] = []
    seen: list[psutil.Process] = []
    for line in run.stdout:
        said.append(line)
        if line.startswith("start:"):
            seen = servers(run)
            for server in seen:
                server.kill()
    assert run.wait() == 0, "".join(said)
    assert any("a vLLM server died: restarting it" in line for line in said), "".join(said)
    events = history(tmp_path)
    trials = [trial for event in events if event["event"] == "scores" for trial in event["trials"]]
    assert trials and not any("fault" in trial or trial["reward"] is None for trial in trials)
    assert [event["round"] for event in events if event["event"] == "round"] == [0, 1, 2, 3]
    best = read_best(tmp_path / "saved_experiments/x-prompt")
    assert best["score"] > 0 and best["candidate"] != "c0"
    store = EpisodeStore(tmp_path / "saved_experiments/x-prompt/episodes.sqlite")
    try:
        for one in store.all():
            (call,) = one.episode.tree.calls
            assert len(call.logprobs) == 4, "exact tokens, as for training"
    finally:
        store.close()
    (server,) = seen
    wait_until(lambda: not server.is_running())  # a killed process takes a moment to be gone


@real_alone
def test_the_model_on_vllm_may_write_the_proposals(tmp_path: Path) -> None:
    """A tiny model can't: it is asked, counted and refused, and no server is left."""
    keys = {"prompt_tuning__proposer": "tuned", "prompt_tuning__proposal_retries": 0, "prompt_tuning__rounds": 1}
    run = start(tmp_path, "best_of", tasks=8, rollout__max_model_len=1024, **keys)
    assert run.stdout is not None
    seen: list[psutil.Process] = []
    said: list[str] = []
    for line in run.stdout:
        said.append(line)
        seen = seen or (servers(run) if line.startswith("start:") else [])
    assert run.wait() == 1, "".join(said)
    assert "".join(said).count("Traceback") == 0
    spent = history(tmp_path)[-1]["spent"]
    assert spent["questions"] == 4 and spent["proposer_prompt_tokens"] > 100 and spent["proposer_sampled_tokens"] > 0
    (server,) = seen
    wait_until(lambda: not server.is_running())  # a killed process takes a moment to be gone
