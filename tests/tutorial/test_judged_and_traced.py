"""The examples of rubrics and of traces: debug and two steps of training, offline, with a scripted helper model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripted_helper import helper

from ajet.cli.main import main
from ajet.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = [
    "model.path=tiny:qwen2-0.3m", "data.train_batch_size=2", "rollout.num_repeat=2", "trainer_common.test_freq=0",
    "trainer_common.total_training_steps=2", "rollout.max_response_length_in_one_turn=8", "rollout.max_num_seqs=8",
]  # fmt: skip


def scripted(question: str) -> str:
    """Stands in for the helper model of both examples."""
    if "You write rubrics" in question:
        return json.dumps({"rubrics": ["The sum must be right and written out."]})
    if "<task>" in question:
        return json.dumps({"good": "can't say" not in question})
    answer = re.findall(r"<answer>\n(.*?)\n</answer>", question, re.DOTALL)[0]
    return json.dumps({"score": (len(answer) % 11) / 10, "reason": "by length"})


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, conf: str, *more: str) -> int:
    monkeypatch.chdir(ROOT)
    with helper(scripted) as server:
        monkeypatch.setenv("HELPER_URL", server.url)
        return main(["--conf", f"tutorial/{conf}", "--exp-dir", str(folder), *SMALL, *more])


@pytest.mark.slow
def test_rubrics_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = "example_rubrics_judge/rubrics_judge.yaml"
    assert run(monkeypatch, tmp_path, conf, "--backbone=debug") == 0
    assert (tmp_path / "rubrics_judge" / "cache" / "rubrics.yaml").is_file()
    assert run(monkeypatch, tmp_path, conf, "rollout.temperature=1.5") == 0
    steps = read_metrics(tmp_path / "rubrics_judge" / "metrics.jsonl")
    assert len(steps) == 2 and all(0 <= step["reward/mean"] <= 1 for step in steps)
    assert all(step.get("status/completed", 0) + step.get("status/truncated", 0) == 4 for step in steps)


@pytest.mark.slow
def test_feedback_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "tutorial" / "example_feedback_tracing" / "make_traces.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "studio.sqlite3")], check=True)
    traces = f"task_reader.feedback_tracing.base_url={tmp_path}/studio.sqlite3"
    conf = "example_feedback_tracing/feedback_tracing.yaml"
    assert run(monkeypatch, tmp_path, conf, traces, "--backbone=debug") == 0
    # an untrained tiny model answers no sum: the two steps run, and say that nothing could be learnt
    assert run(monkeypatch, tmp_path, conf, traces) in (0, 1)
    assert len(read_metrics(tmp_path / "feedback_tracing" / "metrics.jsonl")) == 2
