"""`ChildProcess`, asked from a process with many files, and after its owner was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ajet.system.json_schemas import PROGRAM
from ajet.system.processes import ChildProcess
from support import ROOT
from support.detached import is_gone
from support.waiting import wait_until

QUESTION = json.dumps({"schema": json.dumps({"type": "integer"}), "value": "text"}).encode() + b"\n"


def test_it_ends_with_an_owner_that_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from ajet.system.processes import ChildProcess\n"
        f"child = ChildProcess(Path({str(PROGRAM)!r}))\n"
        f"child.ask({QUESTION!r}, 60)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not is_gone(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: is_gone(pid), 60)


@pytest.mark.skipif(os.sysconf("SC_OPEN_MAX") <= 1200, reason="no file numbers above 1023 here")
def test_a_child_is_asked_from_a_process_with_many_files() -> None:
    """File numbers above 1023, which `select` does not take."""
    child = ChildProcess(PROGRAM)
    low = child._answers
    child._answers = high = os.dup2(low, 1101)
    try:
        assert "breach" in json.loads(child.ask(QUESTION, 60))
    finally:
        child.end()
        os.close(high)
