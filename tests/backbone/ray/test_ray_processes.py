"""Ending everything that a run on Ray started, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ajet.backbone.ray.processes import MARK, end_all, of_run


def test_everything_marked_is_ended_orphans_too() -> None:
    """The child starts a grandchild in a session of its own, which ignores SIGTERM, and goes."""
    mark = f"test-{os.getpid()}"
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, MARK: mark}, check=True, stdout=subprocess.DEVNULL)
    assert len(of_run(mark)) == 1
    time.sleep(0.3)
    end_all(mark, patience_s=0.5)
    assert of_run(mark) == []


def test_a_process_that_lost_its_mark_is_found_in_its_session() -> None:
    """As Ray's agents do, which write their title over it. Its parent has gone already."""
    mark = f"test-{os.getpid()}"
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], env={})"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: mark}, start_new_session=True)
    parent.wait()
    assert of_run(mark) == []
    assert len(of_run(mark, parent.pid)) == 1
    assert end_all(mark, session=parent.pid) == 1
    assert of_run(mark, parent.pid) == []
