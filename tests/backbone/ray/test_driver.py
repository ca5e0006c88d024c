"""What every driver does before it runs verl or Trinity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ajet.backbone.ray.payload import DriverInput

DRIVER = """
import sys
from ajet.backbone.ray.payload import run_driver
from ajet.schema.errors import ConfigError

def run(given):
    raise ConfigError(f"verl has no key {given.settings['key']!r}\\n    did you mean lr?")

run_driver(sys.argv[1], run)
"""


def test_an_error_of_ours_reaches_the_launcher_in_full(tmp_path: Path) -> None:
    given, error = tmp_path / "run.json", tmp_path / "error.txt"
    DriverInput({"key": "lrr"}, "payload", {"address": "local"}, nodes=0, error_file=str(error)).write(given)
    assert given.stat().st_mode & 0o777 == 0o600  # the configuration may hold keys
    done = subprocess.run([sys.executable, "-c", DRIVER, str(given)], capture_output=True, timeout=60)
    assert done.returncode == 1
    assert error.read_text() == "verl has no key 'lrr'\n    did you mean lr?"
