"""`ajet bench`: real runs, a run that crashes, resumption, and what is wrong with the arguments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet.cli.main import main
from support.waiting import wait_until

TALK = """
import os
from ajet import Workflow, WorkflowOutput

class Talk(Workflow):
    name: str = "talk"

    async def execute(self, workflow_task, tuner):
        if tuner.config.ajet.rollout.seed == 2:
            os.abort()
        client = tuner.as_raw_openai_sdk_client()
        said = await client.chat.completions.create(messages=[{"role": "user", "content": "speak"}])
        text = said.choices[0].message.content or ""
        return WorkflowOutput(reward=sum(letter in "aeiou" for letter in text) / 8)
"""
CONFIG = """
ajet:
  project_name: tests
  model: {path: "tiny:qwen2-0.3m"}
  task_reader: {type: random_dummy}
  data: {train_batch_size: 2, max_prompt_length: 96, max_response_length: 16}
  rollout:
    user_workflow: talk.py->Talk
    num_repeat: 2
    max_model_len: 112
    max_response_length_in_one_turn: 8
    compute_madness_checklist: []
  trainer_common: {total_training_steps: 2, test_freq: 1, save_freq: 0, val_before_train: true, logger: [console]}
"""
MATRIX = """
rows:
  - {name: talk, conf: talk.yaml, seeds: [1], band: {end: [0.0, 1.0]}}
  - {name: crash, conf: talk.yaml, seeds: [2]}
"""


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "talk.yaml").write_text(CONFIG)
    (tmp_path / "board.yaml").write_text(MATRIX)
    monkeypatch.chdir(tmp_path)
    return "board.yaml"


def record(name: str) -> dict[str, Any]:
    return dict(json.loads(Path("records", f"{name}.json").read_text()))


@pytest.mark.slow
def test_cells_run_are_recorded_and_skipped_and_a_crash_is_a_record(
    matrix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", matrix, "--jobs", "2", "--page", "page"]) == 1
    said = capsys.readouterr()
    assert "cells: 2, of which 0 have their record and 2 run now" in said.out
    assert "crash-2: failed (-6): ended by signal 6" in said.err and "talk-1:" not in said.err
    good, crashed = record("talk-1"), record("crash-2")
    assert good["exit_code"] == 0 and good["figures"]["steps"] == 2 and good["figures"]["tokens"] > 0
    assert good["figures"]["memory_mib"] > 100 and good["figures"]["sampler_gap"] < 1e-3
    assert len(good["curve"]["validation"]) == 3 and good["versions"]["torch"]
    assert crashed["exit_code"] == -6 and "signal 6" in crashed["error"] and crashed["curve"]["validation"] == []
    assert "crash-2: failed" in Path("page/index.html").read_text()

    assert main(["bench", matrix, "--only", "talk"]) == 0
    assert "cells: 1, of which 1 have their record and 0 run now" in capsys.readouterr().out
    Path(matrix).write_text(MATRIX.replace("end: [0.0, 1.0]", "end: [2.0, null]"))
    assert main(["bench", matrix, "--only", "talk-1"]) == 1  # not run again: a band is no setting of the run
    assert "talk-1: end is" in (said := capsys.readouterr()).err and "its band is 2 to …" in said.err
    assert main(["bench", matrix, "--list"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["done", "again"]


@pytest.mark.slow
def test_an_interruption_ends_the_runs_and_keeps_no_half_record(matrix: str) -> None:
    Path("talk.py").write_text(TALK.replace("os.abort()", "await __import__('asyncio').sleep(600)"))
    command = [sys.executable, "-m", "ajet", "bench", matrix, "--only", "crash"]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = Path("saved_experiments/bench/crash-2/run.log")
    try:
        wait_until(log.exists, seconds=400)
        children = subprocess.run(["pgrep", "-P", str(bench.pid)], capture_output=True, text=True).stdout.split()
        bench.send_signal(signal.SIGINT)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.wait()
    assert bench.returncode == 130 and "stopped: what has ended keeps its record" in said
    assert children and not any(os.path.exists(f"/proc/{pid}") for pid in children)
    assert not Path("records").exists()


def test_what_is_wrong_is_named(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in [
        (["--only", "tlak"], "--only tlak: no cell and no row has this name\n    did you mean talk?"),
        (["--jobs", "0"], "'0': write a whole number from 1 to 1,000"),
        (["--python", "verl=/nowhere/python"], "write BACKBONE=PYTHON with an interpreter that exists"),
    ]:
        assert main(["bench", matrix, *arguments]) == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "bord.yaml"]) == 2
    assert "did you mean board.yaml?" in capsys.readouterr().err


def test_a_cold_start_that_fails_is_the_record_of_its_cells(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("first.yaml").write_text(CONFIG.replace("num_repeat", "num_repeet"))
    Path(matrix).write_text("rows:\n  - {name: talk, conf: talk.yaml, cold_start: {conf: first.yaml}}\n")
    assert main(["bench", matrix]) == 1
    assert "talk-1: failed (2): its cold start failed: first.yaml:" in (said := capsys.readouterr()).err
    assert "did you mean `ajet.rollout.num_repeat`" in said.err and record("talk-1")["exit_code"] == 2


def test_a_program_that_can_t_make_the_data_is_named(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("make.py").write_text("raise SystemExit('no room for data')")
    Path(matrix).write_text("rows:\n  - {name: talk, conf: talk.yaml, prepare: make.py}\n")
    assert main(["bench", matrix]) == 2
    assert "make.py ended with 1\n    no room for data" in capsys.readouterr().err
