"""What the launcher leaves behind, and what it clears up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ajet.backbone.ray.launcher import keep_weights, remove_abandoned


def test_a_killed_launchers_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"ajv{ended.pid}_a", f"ajv{os.getpid()}_b", "ajvother"):
        (tmp_path / name).mkdir()
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"ajv{os.getpid()}_b", "ajvother"])


def test_the_newest_weights_take_the_place_of_older_ones(tmp_path: Path) -> None:
    source, target = tmp_path / "checkpoint", tmp_path / "hf"
    keep_weights(source, target)
    assert not target.exists()
    for folder, name in ((source, "new"), (target, "old")):
        folder.mkdir()
        (folder / name).touch()
    keep_weights(source, target)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoint", "hf", "new", "new"]
