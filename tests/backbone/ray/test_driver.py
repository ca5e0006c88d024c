"""What every driver does before it runs verl or Trinity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ajet.backbone.ray.facts import DriverInput, RunError, RunPayload
from ajet.schema.errors import UserError

DRIVER = """
import sys
from ajet.backbone.ray.facts import run_driver
from ajet.schema.errors import ConfigError

def run(given):
    raise ConfigError(f"verl has no key {given.settings['key']!r}\\n    did you mean lr?")

run_driver(sys.argv[1], run)
"""


def test_an_error_of_ours_reaches_the_launcher_in_full(tmp_path: Path) -> None:
    given = tmp_path / "run.json"
    payload = RunPayload({}, base_dir="", yaml_path="", model_path="", reports=str(tmp_path))
    DriverInput({"key": "lrr"}, payload.encode(), {"address": "local"}, nodes=0).write(given)
    assert given.stat().st_mode & 0o777 == 0o600  # the configuration may hold keys
    done = subprocess.run([sys.executable, "-c", DRIVER, str(given)], capture_output=True, timeout=60)
    assert done.returncode == 1
    assert RunError.read(tmp_path) == RunError("verl has no key 'lrr'\n    did you mean lr?", users=True)


def test_of_what_a_runs_processes_report_the_first_counts(tmp_path: Path) -> None:
    assert RunError.read(tmp_path) is None
    RunError.of(KeyError("answer")).write(str(tmp_path))
    RunError.of(UserError("later")).write(str(tmp_path))
    assert RunError.read(tmp_path) == RunError("KeyError: 'answer'", users=False)
