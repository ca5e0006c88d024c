"""Where benchmark figures go: `benchmarks/results/<name>.json`, with the date and the machine they were measured on.

And what the scripts share that run the `ajet` command.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """The hardware and the versions a figure belongs to."""
    cpu = platform.processor() or "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {"cpu": cpu, "cores": os.cpu_count(), **versions}


def write_result(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures of one benchmark and return the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"benchmark": name, "date": datetime.now(UTC).date().isoformat(), "machine": machine(), "figures": figures}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def known_figures(name: str) -> dict[str, Any]:
    """The figures of a benchmark so far."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["figures"]) if path.exists() else {}


def ajet_command(conf: Path, folder: Path, *settings: str) -> list[str]:
    """The command of one run, whose folder is made in `folder`."""
    return [sys.executable, "-m", "ajet", "--conf", str(conf), "--exp-dir", str(folder), "--quiet", *settings]


def seeds_of(seed: int) -> list[str]:
    """Settings that give a run's parts their seed."""
    return [f"{part}.seed={seed}" for part in ("rollout", "trainer_common", "task_reader")]


def validations(steps: list[dict[str, Any]], name: str = "reward/mean") -> dict[int, float]:
    """What a run's metrics say of its validations, by step."""
    return {step["step"]: round(step[f"val/{name}"], 4) for step in steps if f"val/{name}" in step}


def is_complete(run: Path, total: int | None) -> bool:
    """Whether a run's folder has all of its steps."""
    from ajet.observe.metrics import read_metrics

    steps = read_metrics(run / "metrics.jsonl")
    return bool(steps) and steps[-1]["step"] == total


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def output_of(command: list[str], threads: int = 1, **variables: str) -> str:
    """What a program prints that has so many threads for torch, and finds ajet and these scripts."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **variables}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join([str(ROOT), str(RESULTS.parent)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout
