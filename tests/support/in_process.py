"""The `ajet` command in the test's own process, where PyTorch is imported already: a new process spends seconds on that
each time. Tests of signals, streams and exits start processes."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path

from ajet.cli.main import main


def ajet(folder: Path, *arguments: str, merged: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder. Returns what a process of its own would: code and output. `merged`: both streams are
    one, as by `2>&1`."""
    out = io.StringIO()
    err = out if merged else io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
