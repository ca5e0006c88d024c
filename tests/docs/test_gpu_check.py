"""`make gpu-check` as far as a machine without a GPU can tell: what it says is missing, and that its parts work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.pages import ROOT

COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py")]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("AJET_VLLM_PYTHON", None)
    return subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    ran = gpu_check("--device", "cuda")
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith("gpu-check: ") and "make gpu-check DEVICE=cpu" in ran.stderr


def test_among_all_benchmarks_it_is_left_out_without_a_gpu(tmp_path: Path) -> None:
    ran = gpu_check("--work", str(tmp_path))
    assert (ran.returncode, ran.stderr, ran.stdout.count("\n")) == (0, "", 1)
    assert ran.stdout.startswith("left out: ")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_part_is_refused_by_name() -> None:
    ran = gpu_check("--device", "cpu", "--part", "gradients")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "--part gradients" in ran.stderr and "gradient-tiny" in ran.stderr


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_ended_and_said(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--part", "gradient-tiny", "--part-minutes", "0.001", "--work", str(tmp_path))
    ran = gpu_check(*arguments)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr
    assert "not measured: it took longer than 0.06 s; its output is in gradient-tiny.log" in ran.stdout
    assert not [one.pid for one in psutil.process_iter() if str(tmp_path) in " ".join(_arguments(one))]


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
def test_a_part_runs_in_small_and_is_not_run_again(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--part", "gradient-tiny", "--part", "vllm-tiny", "--work", str(tmp_path))
    ran = gpu_check(*arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    parts = json.loads((tmp_path / "cpu" / "state.json").read_text())["parts"]
    assert set(parts) == {"gradient-tiny", "vllm-tiny"}
    assert "--vllm-python" in parts["vllm-tiny"]["not_measured"]
    assert 0 < parts["gradient-tiny"]["float32"]["tree"] < 1e-4
    assert 1e-4 < parts["gradient-tiny"]["bfloat16"]["tree"] < 0.1
    again = gpu_check(*arguments)
    assert again.returncode == 0 and "gradient-tiny: measured before" in again.stdout
