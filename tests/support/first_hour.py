"""Runs the commands of `docs/first_hour.md` as a stranger would, and writes what they print into the page.

python tests/support/first_hour.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first_hour.md"
BLOCK = re.compile(r"^```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL)
PASSING = re.compile(r"^  (?:rollout|validate) \d+", re.MULTILINE)
"""Lines about a phase that takes long: they come on a slow machine only."""


def commands() -> list[str]:
    """All commands of the page, from the clone to the export, in order."""
    found = re.findall(r"^```(bash|console)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for kind, code in found for line in (code.splitlines() if kind == "bash" else code.splitlines()[:1])]
    plain = [re.sub(r"\s+#.*", "", line.removeprefix("$ ")) for line in lines if line.strip()]
    return plain[: 1 + max(index for index, line in enumerate(plain) if line.startswith("ajet export"))]


def arrive(folder: Path) -> Path:
    """Run the page's first block as it is. Returns the clone. Only what takes minutes is shortened: the environment is
    this one, and the demo has two steps."""
    (first, *others) = (line for line in commands() if line in _first_block())
    clone = folder / first.rpartition("cd ")[2]
    source = folder / "host" / clone.name
    source.parent.mkdir()
    source.symlink_to(ROOT)
    _run(first.replace("<this repository>", str(source)), folder, os.environ)
    venv.create(clone / ".venv", with_pip=False)
    packages = next((clone / ".venv").glob("lib/*/site-packages"))
    sites = [path for path in sys.path if path.endswith("-packages")]
    (packages / "these.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in sites))
    program = clone / ".venv/bin/ajet"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{clone}" exec "{clone}/.venv/bin/python" -m ajet "$@"\n')
    program.chmod(0o755)
    conf = clone / "configs/quickstart.yaml"
    text = re.sub(r"(total_training_steps|test_freq): \d+", r"\1: 2", conf.read_text(encoding="utf-8"))
    conf.write_text(text, encoding="utf-8")
    (clone / ".venv/.ready").touch()
    printed = _run("\n".join([*others, f"pwd > {folder}/.where", "command -v ajet"]), clone, os.environ)
    assert printed.endswith(f"{program}\n"), printed
    return clone


def _first_block() -> str:
    found = re.search(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def _run(script: str, folder: Path, environment: Mapping[str, str]) -> str:
    ran = subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def outputs(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Each command of the page that shows its output, that output, and what it prints now; they run one after another
    where the page's first block ended, with the `ajet` of its clone."""
    clone = arrive(folder)
    base = Path((folder / ".where").read_text().strip())
    environment = {**os.environ, "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        script = f"{block['command']}; pwd > {folder}/.where"
        ran = subprocess.run(
            ["bash", "-c", script],
            cwd=Path((folder / ".where").read_text().strip()),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        printed = "".join(line for line in ran.stdout.splitlines(keepends=True) if not PASSING.match(line))
        yield block["command"], block["output"], printed.replace(str(base), "/home/me/mine").strip("\n")


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
