"""Runs the commands of the pages that show a whole session, in order, in an empty folder, and writes what they print
into the page. A block with a title becomes a file of that name. A line `…` in an output stands for any number of lines.

python tests/support/console.py [PAGE ...]
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("first_hour.md", "first_real_run.md")
BLOCK = re.compile(
    r"^```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]+)\n(?P<output>.*?)^```$"
    r"|^```\w+ title=\"(?P<file>[^\"]+)\"\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PASSING = re.compile(r"^  (?:rollout|validate) \d+", re.MULTILINE)
"""Lines about a phase that takes long: they come on a slow machine only."""
MARK = "-- the next command --"
LIMIT_S = 1800


def outputs(page: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Each command of the page, the output that the page shows, and what it prints now."""
    blocks = list(BLOCK.finditer((ROOT / "docs" / page).read_text(encoding="utf-8")))
    script = [f'{name}() {{ "{sys.executable}" {what} "$@"; }}' for name, what in PROGRAMS.items()]
    for block in blocks:
        if name := block["file"]:
            script += [f"mkdir -p $(dirname {name})", f"cat > {name} <<'END OF FILE'\n{block['text']}END OF FILE"]
        else:
            script += [f"echo '{MARK}'", block["command"]]
    printed = _run("\n".join(script), folder).replace(str(folder), "/home/me/mine").split(f"{MARK}\n")[1:]
    commands = [block for block in blocks if block["command"]]
    assert len(printed) == len(commands), f"{page}: the shell ended early:\n{printed[-1]}"
    for block, output in zip(commands, printed, strict=True):
        lines = [line for line in output.splitlines() if not PASSING.match(line)]
        shown = block["output"].strip("\n").splitlines()
        yield block["command"], "\n".join(shown), "\n".join(shortened(lines, shown)).strip("\n")


PROGRAMS = {"ajet": "-m ajet", "python": "", "pytest": "-m pytest -p no:cacheprovider"}


def shortened(printed: list[str], shown: list[str]) -> list[str]:
    """What was printed, with as many lines at both ends as are shown around the `…`."""
    if "…" not in shown:
        return printed
    head = shown.index("…")
    tail = len(shown) - head - 1
    return [*printed[:head], "…", *printed[len(printed) - tail :]]


def _run(script: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    for name in ("COLUMNS", "PYTEST_ADDOPTS"):  # how the tests are run is no part of what a page shows
        environment.pop(name, None)
    file = folder.with_name(f"{folder.name}.out")
    with file.open("w") as printed:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)  # a server that a failed page has left
    return file.read_text(encoding="utf-8")


def write(page: str) -> None:
    """Put what the commands print now into the page, and into its translation."""
    replaced = []
    with tempfile.TemporaryDirectory() as folder:
        (home := Path(folder).resolve() / "home").mkdir()
        for command, shown, printed in outputs(page, home):
            print(f"$ {command}\n{printed}", flush=True)
            old, new = (f"```console\n$ {command}\n{text}{chr(10) if text else ''}```" for text in (shown, printed))
            replaced.append((old, new))
    for file in (ROOT / "docs" / page, ROOT / "docs" / "zh" / page):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            for old, new in replaced:
                text = text.replace(old, new)
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:] or PAGES:
        write(each)
