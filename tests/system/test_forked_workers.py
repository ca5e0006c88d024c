"""The worker processes of a runner: real forks, in a program of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support import TESTS
from support.detached import is_gone
from support.waiting import wait_until

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from ajet.system.forking import ForkedWorkers
from support import TESTS
from support.detached import detach

folder = Path(sys.argv[1])

def body(number, runner):
    assert os.getppid() == runner
    if number == 0:
        detach(str(folder / "detached"))
        left = subprocess.Popen(["sleep", "600"])
        (folder / "left").write_text(str(left.pid))
        return 3
    if number == 1:
        raise ValueError("mine")
    (folder / "waits").write_text(str(os.getpid()))
    time.sleep(600)

workers = ForkedWorkers(body)
signal.signal(signal.SIGTERM, lambda *_: workers.stop())
for number in range(3):
    workers.start(number)
subprocess.Popen(["true"])  # no worker: reaped, and nothing said
while workers:
    print(*workers.wait(), flush=True)
workers.start(4)
print("left:", len(workers))
"""


def test_workers_end_and_are_told_apart(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    first = sorted(program.stdout.readline() for _ in range(2))
    assert first == ["0 3\n", "1 1\n"], "the exit code, and 1 for an exception"
    left = int((tmp_path / "left").read_text())
    wait_until(lambda: is_gone(left) and is_gone(int((tmp_path / "detached").read_text())))
    wait_until((tmp_path / "waits").exists)
    os.kill(program.pid, signal.SIGTERM)
    out, err = program.communicate(timeout=60)
    assert out == f"2 {-signal.SIGTERM}\nleft: 0\n", "after stop, none starts"
    assert "ValueError: mine" in err
