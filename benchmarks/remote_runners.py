"""The quickstart with three runners elsewhere, one of which is killed -9 every few seconds, with all of its workers.

Does it reach the bar of the quickstart, and does every episode's ledger balance? Are its tokens all accounted for?
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, ajet_command, free_port, validations, write_result

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.metrics import read_metrics
from ajet.task_runner.remote import KEY_VARIABLE

WORKFLOW = "tutorial/example_math_agent/quickstart/workflow.py->QuickstartWorkflow"
RUNNERS = 3
WORKERS = 4
EVERY_S = 4.0
LEASE_S = 3.0


class Killed:
    """Runners. Every few seconds one of them is killed, and another takes its place."""

    def __init__(self, port: int, environment: dict[str, str], every_s: float) -> None:
        self._every_s = every_s
        self._command = [sys.executable, "-m", "ajet", "runner", "--connect", f"http://127.0.0.1:{port}"]
        self._command += ["--workflow", WORKFLOW, "--workers", str(WORKERS)]
        self._environment = environment
        self._stop = threading.Event()
        self._runners = [self._start() for _ in range(RUNNERS)]
        self.kills = 0
        self.workers_killed = 0
        self._thread = threading.Thread(target=self._kill_again_and_again)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _kill_again_and_again(self) -> None:
        draw = random.Random(0)
        while not self._stop.wait(self._every_s):
            at_work = [place for place, runner in enumerate(self._runners) if workers_of(runner)]
            if not at_work:  # all of them are still starting
                continue
            number = draw.choice(at_work)
            self.workers_killed += kill(self._runners[number])
            self._runners[number] = self._start()
            self.kills += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        for runner in self._runners:
            kill(runner)


def workers_of(runner: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(runner.pid).children(recursive=True) if runner.poll() is None else []


def kill(runner: subprocess.Popen[bytes]) -> int:
    """The runner and its workers, at once, as when a machine goes. How many workers there were."""
    workers = workers_of(runner)
    if runner.poll() is not None:
        return 0
    for process in (runner, *workers):
        process.send_signal(signal.SIGKILL)
    runner.wait()
    return len(workers)


def conduct(folder: Path, every_s: float) -> dict[str, Any]:
    port = free_port()
    environment = {**os.environ, KEY_VARIABLE: "sk-ajet-" + "q" * 40, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ajet_command(ROOT / "configs" / "quickstart.yaml", folder)
    command += ["task_runner.wrapper_type=remote", f"task_runner.remote.port={port}", "rollout.episode_retries=3"]
    command += [f"task_runner.remote.lease={LEASE_S:g}"]
    runners = Killed(port, environment, every_s)
    began = time.perf_counter()
    try:
        run = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    finally:
        runners.end()
    seconds = time.perf_counter() - began
    validation = validations(read_metrics(folder / "quickstart" / "metrics.jsonl"))
    return {
        "exit_code": run.returncode,
        "seconds": seconds,
        "kills": runners.kills,
        "workers_killed": runners.workers_killed,
        "validation": validation,
        "last": list(validation.values())[-1],
        **accounts(folder / "quickstart" / "episodes.sqlite"),
    }


def accounts(file: Path) -> dict[str, Any]:
    """Every episode's ledger has to balance: what was captured was trained, masked or dropped with a reason."""
    recorded = EpisodeStore(file)
    counts: dict[str, int] = {"episodes": 0, "ledgers_that_balance": 0, "run_more_than_once": 0}
    statuses: dict[str, int] = {}
    for one in recorded.all():
        counts["episodes"] += 1
        one.episode.ledger.balance()  # raises
        counts["ledgers_that_balance"] += 1
        counts["run_more_than_once"] += one.episode.attempts > 1
        statuses[one.episode.status.value] = statuses.get(one.episode.status.value, 0) + 1
    recorded.close()
    return {**counts, "statuses": statuses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=float, default=EVERY_S, help=f"seconds between kills (default: {EVERY_S:g})")
    every_s = parser.parse_args().every
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        figures = conduct(Path(scratch), every_s)
    figures |= {"seconds_between_kills": every_s, "load_before": load, "load_after": os.getloadavg()[0]}
    write_result("remote_runners", figures)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
