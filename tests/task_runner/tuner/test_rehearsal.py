"""After a rehearsal, a first request and a first span import nothing, and a fork is safe."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import gc, json, os, sys, threading
from ajet.task_runner.tuner import SpanSink
from ajet.task_runner.tuner.clients import rehearse

rehearse()
known = set(sys.modules)
gc.collect()
open_files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
rehearse()
SpanSink.to_gateway("http://127.0.0.1:1/v1", "key")
sockets = [name for name in open_files if "socket:" in name]
imported = sorted(set(sys.modules) - known)
report = {"threads": threading.active_count(), "sockets": sockets, "imported": imported}
print(json.dumps(report))
"""


@pytest.mark.slow
def test_nothing_is_left_to_import_and_nothing_is_left_open() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == {"threads": 1, "sockets": [], "imported": []}
