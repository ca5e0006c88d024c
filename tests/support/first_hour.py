"""Runs the commands of `docs/first_hour.md`, in order, in an empty folder, and writes what they print into the page.

python tests/support/first_hour.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first_hour.md"
BLOCK = re.compile(r"^```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL)
PASSING = re.compile(r"^  (?:rollout|validate) \d+", re.MULTILINE)
"""Lines about a phase that takes long: they come on a slow machine only."""


def outputs(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Each command of the page, the output that the page shows, and what it prints now."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    ajet = f'ajet() {{ "{sys.executable}" -m ajet "$@"; }}'
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        script = f"{ajet}; {block['command']}; pwd > {folder}/.where"
        ran = subprocess.run(
            ["bash", "-c", script],
            cwd=Path((folder / ".where").read_text().strip()) if (folder / ".where").exists() else folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        printed = "".join(line for line in ran.stdout.splitlines(keepends=True) if not PASSING.match(line))
        yield block["command"], block["output"], printed.replace(str(folder), "/home/me/mine").strip("\n")


def main() -> None:
    """Write the page."""
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for command, shown, printed in outputs(Path(folder).resolve()):
            old = f"```console\n$ {command}\n{shown}```"
            text = text.replace(old, f"```console\n$ {command}\n{printed}{chr(10) if printed else ''}```")
            print(f"$ {command}\n{printed}", flush=True)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
