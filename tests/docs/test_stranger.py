"""A stranger's way from the clone over the demo and an agent of their own to exported weights is short, and its first
commands work as they stand on the page. The others run in `test_console.py`."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from support import ROOT

PAGE = (ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """All commands of the page, from the clone to the export, in order."""
    found = re.findall(r"^```(bash|console)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for kind, code in found for line in (code.splitlines() if kind == "bash" else code.splitlines()[:1])]
    plain = [re.sub(r"\s+#.*", "", line.removeprefix("$ ")) for line in lines if line.strip()]
    return plain[: 1 + max(index for index, line in enumerate(plain) if line.startswith("ajet export"))]


def test_it_is_not_far() -> None:
    way = commands()
    assert way[0].startswith("git clone") and way[1] == "make demo" and way[-1].startswith("ajet export weights")
    assert any(line.startswith("ajet init") for line in way)
    assert len(way) <= 20, way


@pytest.mark.slow
def test_the_first_commands_lead_to_an_ajet_on_the_path(tmp_path: Path) -> None:
    """Only what takes minutes is shortened: the environment is this one, and the demo has two steps."""
    clone_it, make_demo, *others = commands()[:4]
    clone = tmp_path / clone_it.rpartition("cd ")[2]
    source = tmp_path / "host" / clone.name
    source.parent.mkdir()
    source.symlink_to(ROOT)
    run(clone_it.replace("<this repository>", str(source)), tmp_path)
    venv.create(clone / ".venv", with_pip=False)
    packages = next((clone / ".venv").glob("lib/*/site-packages"))
    sites = [path for path in sys.path if path.endswith("-packages")]
    (packages / "these.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in sites))
    program = clone / ".venv/bin/ajet"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{clone}" exec "{clone}/.venv/bin/python" -m ajet "$@"\n')
    program.chmod(0o755)
    conf = clone / "configs/quickstart.yaml"
    conf.write_text(re.sub(r"(total_training_steps|test_freq): \d+", r"\1: 2", conf.read_text(encoding="utf-8")))
    (clone / ".venv/.ready").touch()
    printed = run("\n".join([make_demo, *others, "command -v ajet"]), clone)
    assert printed.endswith(f"{program}\n"), printed


def run(script: str, folder: Path) -> str:
    ran = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout
