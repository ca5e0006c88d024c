"""What a person sees on a terminal when something of theirs is wrong: the reason, and what to change, at the end."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import in_process
from support.screen import Terminal

COLUMNS, ROWS = 120, 40
CONF = """\
ajet:
  experiment_name: screen
  model: {path: "tiny:qwen2-0.3m"}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}}
  rollout:
    num_repeat: 2
    max_model_len: 512
    max_response_length_in_one_turn: 32
    compute_madness_checklist: []
  data: {train_batch_size: 2, max_prompt_length: 256, max_response_length: 256}
  trainer_common: {total_training_steps: 1}
"""
AGENTS = """\
import asyncio, sys, time
import httpx
import openai
from ajet import Workflow, WorkflowOutput


async def ask(tuner, text="hello"):
    client = tuner.as_raw_openai_sdk_client()
    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content


class Service(Workflow):
    async def execute(self, workflow_task, tuner):
        await ask(tuner)
        async with httpx.AsyncClient() as client:
            (await client.get("ADDRESS")).raise_for_status()


class Sleep(Workflow):
    async def execute(self, workflow_task, tuner):
        time.sleep(600)


class Coroutine(Workflow):
    async def execute(self, workflow_task, tuner):
        async def score(): return 1.0
        await ask(tuner)
        return WorkflowOutput(reward=score())


class Field(Workflow):
    async def execute(self, workflow_task, tuner):
        await ask(tuner)
        return WorkflowOutput(reward=1.0, metadata=["a list"])


class NoKey(Workflow):
    async def execute(self, workflow_task, tuner):
        openai.AsyncOpenAI(api_key=None)


class Loop(Workflow):
    async def execute(self, workflow_task, tuner):
        asyncio.run(asyncio.sleep(0))


class Long(Workflow):
    async def execute(self, workflow_task, tuner):
        return WorkflowOutput(reward=float(len(await ask(tuner, "word " * 900))))


class Cut(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        async with client.responses.stream(model="m", input="hello") as stream:
            return WorkflowOutput(reward=float(len((await stream.get_final_response()).output_text)))


class Random(Workflow):
    async def execute(self, workflow_task, tuner):
        await ask(tuner)
        return WorkflowOutput(reward=1.0)
"""
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "a service answers 500": (
        "Service",
        [],
        ["4 × workflow_error, HTTPStatusError: Server error '500", "agents.py:17"],
    ),
    "a blocking sleep": (
        "Sleep",
        ["rollout.episode_timeout=3"],
        ["4 × timeout, EpisodeTimeout", "within 3 s, at agents.py:22 in execute"],
    ),
    "a coroutine as reward": (
        "Coroutine",
        [],
        ["reward", "write `await` before the call"],
    ),
    "a wrong field": ("Field", [], ["metadata: Input should be a valid dictionary, not ['a list']", "agents.py:35"]),
    "a client of one's own": ("NoKey", [], ["write client = tuner.as_raw_openai_sdk_client()"]),
    "a loop in a loop": ("Loop", [], ["write `await …` instead, or a plain `def` without async"]),
    "a long prompt": ("Long", [], ["ajet.rollout.max_model_len: raise it"]),
    "a cut reply": (
        "Cut",
        [],
        ["4 of 4 episodes had a reply cut at its maximum length: raise ajet.rollout.max_response_length_in_one_turn"],
    ),
    "random weights": (
        "Random",
        ["rollout.compute_madness_checklist=['nonsense']"],
        ["compute_madness_checklist"],
    ),
}


ON_A_TERMINAL = ("a service answers 500", "a blocking sleep", "random weights")
"""What is said at the end depends on the cause, how it is shown doesn't; and a sleeping thread outlives its run."""


class Failing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(500)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        (tmp_path / "conf.yaml").write_text(CONF)
        (tmp_path / "agents.py").write_text(AGENTS.replace("ADDRESS", f"http://127.0.0.1:{server.server_port}/orders"))
        (tmp_path / "tasks.jsonl").write_text('{"query": "a"}\n{"query": "b"}\n')
        yield tmp_path
        server.shutdown()


def on_a_terminal(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ajet", *arguments]
    with Terminal(command, columns=COLUMNS, rows=ROWS, cwd=folder, env={"OMP_NUM_THREADS": "1"}) as terminal:
        shown = terminal.finish(120)
        return terminal.process.returncode, shown


def in_this_process(folder: Path, *arguments: str) -> tuple[int, str]:
    """As on a terminal: its lines are as long, and both streams lead to it."""
    done = in_process.ajet(folder, *arguments, merged=True)
    shown = done.stdout.splitlines()
    lines = [line[at : at + COLUMNS] for line in shown for at in range(0, max(len(line), 1), COLUMNS)]
    return done.returncode, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CASES)
def test_the_cause_is_the_last_thing_on_one_screen(cause: str, project: Path) -> None:
    workflow, overrides, said = CASES[cause]
    run = on_a_terminal if cause in ON_A_TERMINAL else in_this_process
    code, shown = run(project, "--conf", "conf.yaml", f"rollout.user_workflow=agents.py->{workflow}", *overrides)
    assert code == 1, shown
    lines = shown.rstrip().splitlines()
    assert len(lines) <= ROWS, shown
    assert "Traceback" not in shown and "never retrieved" not in shown
    start = next(number for number, line in enumerate(lines) if line.startswith("error: nothing was trained"))
    end = " ".join("".join(lines[start:]).split())
    for part in said:
        assert part.replace(" ", "") in end.replace(" ", ""), shown
    assert "look at the episodes: ajet view" in lines[-1]
    log = (project / "saved_experiments" / "screen" / "run.log").read_text()
    assert workflow in ("Random",) or "agents.py" in log, "whose traceback is in the log"
