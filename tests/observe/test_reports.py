"""What a test says reaches whoever started the tests, whatever it is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import TESTS

REPORTS = """
import logging, warnings

def test_error():
    logging.error("captured \\udc80")
    raise OSError("named \\udc81")

def test_warning():
    warnings.warn("warned \\udc82")
"""


@pytest.mark.slow
def test_text_that_is_not_utf8_ends_no_worker(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(REPORTS)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", str(tmp_path)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(line, cwd=tmp_path, env=inherited, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed, 1 warning" in done.stdout, done.stdout + done.stderr
    assert all(f"\\udc8{number}" in done.stdout for number in range(3))
    assert "INTERNALERROR" not in done.stdout
