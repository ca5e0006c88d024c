"""Runs Python code written by a model, in a separate process that can do little harm, and returns what it printed.

The process has a clean environment, an empty folder that is deleted afterwards, limits on time, memory, file size and
processes, no new privileges and, if the kernel allows it, no network.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 5
MEMORY_MB = 512
OUTPUT_CHARACTERS = 2000

# Runs inside the new process: confine it, then become an interpreter that runs the code. Doing this in a fresh
# interpreter instead of a `preexec_fn` keeps it safe when the parent has threads. In a process namespace of its own,
# the end of the first process ends whatever it started.
_CONFINE = """
import ctypes, os, resource, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
NEW_PROCESSES, NEW_NETWORK, NEW_USER = 0x20000000, 0x40000000, 0x10000000
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
for flags in (NEW_USER | NEW_NETWORK | NEW_PROCESSES, NEW_NETWORK | NEW_PROCESSES, NEW_NETWORK):
    if libc.unshare(flags) == 0:
        break
child = os.fork()
if child:
    status = os.waitpid(child, 0)[1]
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
seconds, megabytes = int(sys.argv[1]), int(sys.argv[2])
for limit, value in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, megabytes << 20),
    (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 32),
    (resource.RLIMIT_NPROC, 16),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
os.execv(sys.executable, [sys.executable, "-I", "-S", "main.py"])
"""


def run_python(code: str) -> str:
    """Run a short Python program and return what it prints.

    Args:
        code (str): the program; print what you want to know.
    """
    with tempfile.TemporaryDirectory(prefix="ajet-python-") as folder:
        Path(folder, "main.py").write_text(code, encoding="utf-8", errors="replace")
        with open(Path(folder, "output"), "w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CONFINE, str(SECONDS), str(MEMORY_MB)],
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout=SECONDS + 1)  # the CPU limit ends a busy loop; this ends a sleeping one
                ended = "" if process.returncode == 0 else f"\n(exit code {process.returncode})"
            except subprocess.TimeoutExpired:
                ended = f"\n(stopped after {SECONDS} s)"
            finally:
                _end(process)
            output.seek(0)
            text = output.read(4 * OUTPUT_CHARACTERS).decode("utf-8", "replace").strip()
    if len(text) > OUTPUT_CHARACTERS:
        text = text[:OUTPUT_CHARACTERS] + " …"
    return (text + ended).strip() or "(no output: print the result)"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything it started, which shares its process group."""
    with contextlib.suppress(ProcessLookupError):  # everything has ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
