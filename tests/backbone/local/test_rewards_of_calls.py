"""Rewards of single calls that a runner elsewhere gives: the call they name is trained, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ajet.observe.episode_store import EpisodeStore
from ajet.task_runner.remote import KEY_VARIABLE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
KEY = "sk-ajet-" + "k" * 40
AGENT = """
import os, subprocess, sys
from ajet import Workflow, WorkflowOutput, emit_reward

SCORE = '''
import sys
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
with provider.get_tracer("score").start_as_current_span("score") as span:
    span.set_attribute("agentlightning.reward.0.name", "primary")
    span.set_attribute("agentlightning.reward.0.value", float(sys.argv[2]))
    span.set_attribute("agentlightning.link.0.key_match", "gen_ai.response.id")
    span.set_attribute("agentlightning.link.0.value_match", sys.argv[1])
provider.shutdown()
'''

class Agent(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        ask = lambda text: client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
        calls = [await ask(text) for text in ("one", "two", "three")]
        reward = float(workflow_task.task_thread_index % 2)
        if workflow_task.task.main_query == "emitted":
            emit_reward(reward, call=calls[0].id)
        else:
            environment = {**os.environ, **tuner.otlp_environment(rewards=True)}
            subprocess.run([sys.executable, "-c", SCORE, calls[0].id, str(reward)], env=environment, check=True)
        return WorkflowOutput(reward=0.0)
"""
CONFIG = """
ajet:
  experiment_name: calls
  model: {path: "tiny:qwen2"}
  task_reader:
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}}
  rollout:
    user_workflow: agent.py->Agent
    num_repeat: 4
    max_response_length_in_one_turn: 8
    compute_madness_checklist: []
  data: {train_batch_size: 2, max_prompt_length: 128, max_response_length: 128}
  trainer_common: {total_training_steps: 1, save_freq: 0, test_freq: 0, algorithm: {baseline: turn}}
  task_runner:
    wrapper_type: remote
    remote: {port: 0}
"""


@contextmanager
def started(folder: Path, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program of ajet's that is ended at the end, with all that it started."""
    command = [sys.executable, "-m", "ajet", *arguments]
    environment = {**os.environ, KEY_VARIABLE: KEY, "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(command, cwd=folder, env=environment, text=True, **options)
    try:
        yield program
    finally:
        children = psutil.Process(program.pid).children(recursive=True) if program.poll() is None else []
        for each in (program, *children):
            each.kill()
        program.wait()


def test_a_reward_from_elsewhere_trains_the_call_it_names(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"main_query": "{name}"}}\n' for name in ("emitted", "otlp")))
    said = ""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(tmp_path, "--conf", "run.yaml", "--exp-dir", "runs", **options) as trainer:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            said += line
            if "runners connect with" in line:
                break
        url = said.rsplit("--connect ", 1)[-1].split()[0]
        assert url.startswith("http"), said
        with started(tmp_path, "runner", "--connect", url, "--workflow", "agent.py->Agent", "--workers", "2"):
            said += trainer.stdout.read()
            assert trainer.wait() == 0, said

    recorded = EpisodeStore(tmp_path / "runs" / "calls" / "episodes.sqlite")
    found = list(recorded.all())
    recorded.close()
    assert len(found) == 8, said
    advantages: dict[tuple[str, float], set[tuple[float, ...]]] = {}
    for one in found:
        named, *others = one.episode.tree.calls
        assert named.reward in (0.0, 1.0)
        assert [call.reward for call in others] == [None, None]
        assert one.annotation.credit is not None
        row = tuple(round(credit.advantage, 6) for credit in one.annotation.credit)
        advantages.setdefault((one.query, named.reward), set()).add(row)
    assert set(advantages) == {(way, reward) for way in ("emitted", "otlp") for reward in (0.0, 1.0)}
    for way in ("emitted", "otlp"):
        ((low, *low_others),), ((high, *high_others),) = advantages[way, 0.0], advantages[way, 1.0]
        assert low < 0.0 < high
        assert [*low_others, *high_others] == [0.0] * 4, "calls that no reward names"
