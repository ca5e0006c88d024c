"""A short version of `benchmarks/sandbox.py`: nothing gets out, in any mode, with and without privileges."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import escape_attempts
from support.bubblewrap_here import needs_bubblewrap

pytestmark = needs_bubblewrap
ROOT = Path(__file__).parents[3]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
NOBODY += ["/bin/sh", "-c", 'exec "$@"', "sh"]  # the first program that setpriv starts is still found by root


def test_nothing_gets_out(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", escape_attempts.CANARY)  # and is removed afterwards
    assert asyncio.run(escape_attempts.succeeded(tmp_path)) == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to become another user")
def test_nothing_gets_out_without_privileges() -> None:
    program = [str(Path(escape_attempts.__file__))]
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        line = [*NOBODY, python]
        tried = subprocess.run(
            [*line, "-c", "import ajet.environment.sandboxes"],
            env=environment,
            capture_output=True,
            check=False,
            cwd="/",
        )
        if tried.returncode == 0:
            done = subprocess.run(
                [*line, *program], env=environment, stdout=subprocess.PIPE, check=True, cwd="/", timeout=300
            )
            assert json.loads(done.stdout) == []
            return
    pytest.skip("another user may run no Python here that finds ajet")
