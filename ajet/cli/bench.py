"""`ajet bench MATRIX.yaml`: run a matrix of training runs, keep a record of each, and say which fall below their band.

Each cell is an `ajet --conf …` of its own, in its own folder. Records lie in `records/` beside the matrix; a cell whose
record is of the same settings and version is not run again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.schema.errors import EXIT_FAILED
from ajet.schema.printable import printable
from ajet.system.command_line import CommandParser, fail, whole

if TYPE_CHECKING:
    from ajet.observe.board import RunEnd
    from ajet.observe.board_matrix import MatrixCell, MatrixRow, StartingRun

SLOT = "AJET_BENCH_SLOT"
"""A run's environment variable: a number that no run at the same time has, so that a YAML can make ports of it."""
LOOK_S = 0.1
MIB = 1024  # of what the kernel counts in KiB


def run(argv: Sequence[str]) -> int:
    """Run the cells that need it. Returns 1 if a cell failed or is outside its band."""
    arguments = _parser().parse_args(argv)
    from ajet.observe.board import is_done, outside_band, read_record
    from ajet.observe.board_matrix import chosen, read_matrix

    rows = read_matrix(arguments.matrix)
    every = [cell for row in rows for cell in row.cells()]
    cells = chosen(every, arguments.only)
    records = arguments.matrix.parent / "records"
    due = [cell for cell in cells if arguments.again or not is_done(read_record(records, cell), cell)]
    if arguments.list:
        _show(cells, records)
        return 0
    print(f"cells: {len(cells)}, of which {len(cells) - len(due)} have their record and {len(due)} run now", flush=True)
    bench = _Bench(arguments, records)
    try:
        bench.prepare([cell.row for cell in due])
        bench.run_cells(due)
    except KeyboardInterrupt:
        print("stopped: what has ended keeps its record, and the same command goes on", file=sys.stderr)
        raise
    if arguments.page is not None:
        from ajet.observe.board import write_page

        print(write_page(rows, records, arguments.page))
    wrong = [line for cell in cells for line in outside_band(cell, read_record(records, cell))]
    return fail("\n    ".join(["not as the matrix expects:", *wrong]), EXIT_FAILED) if wrong else 0


def _parser() -> CommandParser:
    parser = CommandParser("ajet bench", description=__doc__)
    parser.add_argument("matrix", type=Path, metavar="MATRIX.yaml")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="CELL", help="these cells or rows alone; `frozen_lake*` is a pattern"
    )
    parser.add_argument("--jobs", type=whole(1, 1000), metavar="N", help="runs at a time (default: half of the cores)")
    parser.add_argument("--again", action="store_true", help="run cells that have their record, too")
    parser.add_argument("--list", action="store_true", help="show the cells, and run none")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write the board there, as index.html")
    parser.add_argument(
        "--runs", type=Path, metavar="FOLDER", help="the runs' experiments (default: saved_experiments/bench)"
    )
    parser.add_argument(
        "--python", action="append", default=[], type=_interpreter, metavar="BACKBONE=PYTHON",
        help="the interpreter whose packages a backbone needs: verl=.venv-verl/bin/python",
    )  # fmt: skip
    return parser


def _interpreter(text: str) -> tuple[str, str]:
    backbone, _, python = text.partition("=")
    if not backbone or shutil.which(python) is None:
        raise ArgumentTypeError(f"{text!r}: write BACKBONE=PYTHON with an interpreter that exists")
    return backbone, os.path.abspath(python) if os.sep in python else python


def _show(cells: Sequence[MatrixCell], records: Path) -> None:
    from ajet.cli.runs import print_table
    from ajet.observe.board import read_record, state_of

    table = [
        [cell.name, cell.row.backbone, cell.row.named, state_of(read_record(records, cell), cell)] for cell in cells
    ]
    print_table(["cell", "backbone", "conf", "record"], table, spare=("conf",))


class _PlannedRun(NamedTuple):
    """A run to start, and what to do when it has ended."""

    name: str
    command: list[str]
    done: Callable[[RunEnd], None]


class _Bench:
    """Starts the runs."""

    def __init__(self, arguments: Namespace, records: Path) -> None:
        self.records = records
        self.runs: Path = arguments.runs or Path("saved_experiments") / "bench"
        self.jobs: int = arguments.jobs or max(1, (os.cpu_count() or 1) // 2)
        self.pythons: dict[str, str] = dict(arguments.python)
        self.broken: dict[str, RunEnd] = {}
        """The cold starts that failed."""

    def prepare(self, rows: Sequence[MatrixRow]) -> None:
        """Make the rows' data, then the weights they start from."""
        from ajet.observe.run_files import is_complete
        from ajet.schema.errors import UserError

        for program in dict.fromkeys(row.prepare for row in rows if row.prepare is not None):
            done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise UserError(f"prepare: {program} ended with {done.returncode}\n    {_last_line(done.stderr)}")
        starts = {row.cold_start.name: row.cold_start for row in rows if row.cold_start is not None}
        self._run_all([self._cold_start(start) for start in starts.values() if not is_complete(self.runs / start.name)])

    def _cold_start(self, start: StartingRun) -> _PlannedRun:
        def done(ended: RunEnd) -> None:
            if ended.exit_code:
                self.broken[start.name] = ended
            print(printable(f"{start.name}: {_how(ended)}"), flush=True)

        return _PlannedRun(start.name, self._command(start.conf, "local", start.name, start.overrides), done)

    def run_cells(self, cells: Sequence[MatrixCell]) -> None:
        """Run them; each has its record as soon as it has ended."""
        jobs = []
        for cell in cells:
            start = cell.row.cold_start
            if start is not None and start.name in self.broken:
                shutil.rmtree(cell.folder(self.runs), ignore_errors=True)  # an earlier run's figures aren't this one's
                ended = self.broken[start.name]
                self._note(cell, ended._replace(error=f"its cold start failed: {ended.error}"))
                continue
            weights = {"model.path": str((self.runs / start.name / "hf").absolute())} if start is not None else {}
            command = self._command(cell.row.conf, cell.row.backbone, cell.name, {**cell.overrides(), **weights})
            jobs.append(_PlannedRun(cell.name, command, partial(self._note, cell)))
        self._run_all(jobs)

    def _note(self, cell: MatrixCell, ended: RunEnd) -> None:
        from ajet.observe.board import make_record, read_record, write_record

        record = make_record(cell, cell.folder(self.runs), ended, read_record(self.records, cell))
        write_record(self.records, record)
        figures = record["figures"]
        gain = f"{figures['start']:g} → {figures['end']:g}, " if "end" in figures else ""
        print(printable(f"{cell.name}: {gain}{_how(ended)}"), flush=True)

    def _command(self, conf: Path, backbone: str, name: str, overrides: Mapping[str, Any]) -> list[str]:
        from ajet.observe.board_matrix import words

        named = {**overrides, "experiment_name": name}
        command = [self.pythons.get(backbone, sys.executable), "-m", "ajet", "--conf", str(conf)]
        return [*command, f"--backbone={backbone}", "--exp-dir", str(self.runs), "--json", *words(named)]

    def _run_all(self, jobs: Sequence[_PlannedRun]) -> None:
        """Run them, so many at a time. Whatever ends this ends the runs."""
        waiting = list(jobs)
        running: dict[int, _LiveRun] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    slot = next(number for number in range(self.jobs) if number not in running)
                    running[slot] = _LiveRun(waiting.pop(0), self.runs, slot)
                time.sleep(LOOK_S)
                for slot, one in list(running.items()):
                    if (ended := one.look()) is not None:
                        del running[slot]
                        one.job.done(ended)
        finally:
            for one in running.values():
                one.child.terminate()
            for one in running.values():
                one.wait()


class _LiveRun:
    """A run's process, and the file with what it prints."""

    def __init__(self, job: _PlannedRun, runs: Path, slot: int) -> None:
        from ajet.system.processes import ending_with_us

        self.job = job
        for name in (job.name, f"{job.name}-prompt", f"{job.name}-debug"):  # a cell starts from nothing
            shutil.rmtree(runs / name, ignore_errors=True)
        runs.mkdir(parents=True, exist_ok=True)
        self.log = runs / f"{job.name}.log"
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                ending_with_us(job.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, SLOT: str(slot)},
                start_new_session=True,  # Ctrl-C comes to us, and we end it
            )

    def look(self) -> RunEnd | None:
        """How it ended, if it has."""
        from ajet.observe.board import RunEnd

        pid, status, used = os.wait4(self.child.pid, os.WNOHANG)
        if not pid:
            return None
        code = os.waitstatus_to_exitcode(status)
        self.child.returncode = code
        spent = used.ru_utime + used.ru_stime
        seconds = time.monotonic() - self.began
        return RunEnd(code, seconds, spent, used.ru_maxrss / MIB, self._error(code) if code else "")

    def _error(self, code: int) -> str:
        """What it said at last, or which signal ended it."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        for line in reversed(text.splitlines()):
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and said.get("event") == "error":
                    return str(said["error"])
        ended = f"ended by signal {-code}" if code < 0 else f"ended with {code}"
        return f"{ended}: {_last_line(text)}"

    def wait(self) -> None:
        """Until it has ended, or is killed with all that it started."""
        from ajet.system.processes import RUN_PATIENCE_S

        with suppress(subprocess.TimeoutExpired):
            self.child.wait(RUN_PATIENCE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, 9)
        self.child.wait()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _how(ended: RunEnd) -> str:
    return f"{ended.seconds:.0f} s" if not ended.exit_code else f"failed ({ended.exit_code}): {ended.error}"
