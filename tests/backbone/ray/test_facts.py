"""What every process of a run on Ray is told, and what its driver does before it runs verl or Trinity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ajet.backbone.ray.facts import DriverInput, RunError, RunPayload
from ajet.config import make_config
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


def test_an_error_of_rays_is_told_by_what_the_actor_raised() -> None:
    class TaskError(Exception):
        cause = KeyError("answer")

    assert RunError.of(TaskError("ray::Explorer.explore()\n  a long traceback")).text == "KeyError: 'answer'"
    assert RunError.of(ValueError("no rows\nin the store")).text == "ValueError: no rows\nin the store"


def test_a_run_crosses_processes_unchanged(tmp_path: Path) -> None:
    config = make_config(
        {"rollout.num_repeat": 3, "user": {"text": "${not.an.interpolation}"}}, frozen_lake={"size": 4}
    )
    sent = RunPayload(config.model_dump(mode="json"), str(tmp_path), "/x/y.yaml", "/models/m", total_steps=7)
    got = RunPayload.decode(sent.encode())
    loaded = got.load_config()
    assert got == sent
    assert "$" not in sent.encode()
    assert loaded.ajet.rollout.num_repeat == 3
    assert loaded.frozen_lake.size == 4
    assert loaded.ajet.user.text == "${not.an.interpolation}"
    assert (loaded.ajet.model.path, str(loaded.yaml_path)) == ("/models/m", "/x/y.yaml")


def test_a_full_disk_of_temporary_files_is_named(tmp_path: Path) -> None:
    full = tmp_path / "run.json"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"run\.json"):
        DriverInput({}, "", {}, 0).write(full)
