"""A process that detaches from what started it, as browsers and daemons do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

_PROGRAM = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.replace(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def detach(file: str) -> int:
    """Start one, forked twice and in a session of its own. Its process id, which it has written to the file."""
    subprocess.run([sys.executable, "-c", _PROGRAM, file], check=True)
    while not os.path.exists(file):
        pass
    return int(Path(file).read_text())


def is_gone(process: int) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
