"""How long a user waits for `ajet --help`, for a valid config, and for the message about each of many broken ones.

Each measurement starts a new process, as a user would. Times are CPU seconds, because wall time depends on what else
the machine does. `loader` is the time within the process from the call to its exit code, imports included.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common import ROOT, write_result

sys.path.insert(0, str(ROOT / "tests"))
from support.mutations import VALID, lay_out, mutations
from support.shipped_mutations import judged, shipped

TIMED = """
import sys, time
before = time.process_time()
from ajet.cli.main import main
code = main(sys.argv[1:])
print(f"LOADER {time.process_time() - before}", file=sys.stderr)
raise SystemExit(code)
"""
TRIES = 7
SPOILT = 3000
SEED = 20_000


def run(*command: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """The finished process, its CPU seconds and its wall seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AJET_STATE_DIR": str(folder / "state")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ran, cpu, time.monotonic() - began


def best(*command: str, folder: Path) -> dict[str, float]:
    """The fastest of several tries."""
    tries = [run(*command, folder=folder) for _ in range(TRIES)]
    return {"cpu_s": round(min(cpu for _, cpu, _ in tries), 3), "wall_s": round(min(wall for *_, wall in tries), 3)}


def main() -> None:
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder)
        (folder / "valid.yaml").write_text(VALID)
        for label, code in (
            ("python_alone", "pass"),
            ("import_ajet", "import ajet"),
            ("help", "from ajet.cli.main import main; main(['--help'])"),
            ("load_valid", "from ajet.config import load_config; load_config('valid.yaml')"),
        ):
            figures[label] = best(sys.executable, "-c", code, folder=folder)
        loader, codes, unnamed = [], set(), []
        cases = mutations()
        for mutation in cases:
            (folder / "broken.yaml").write_bytes(mutation.content)
            ran, _, _ = run(sys.executable, "-c", TIMED, "--conf", "broken.yaml", folder=folder)
            codes.add(ran.returncode)
            loader.append(float(ran.stderr.rpartition("LOADER ")[2]))
            if not all(text in ran.stderr for text in mutation.names):
                unnamed.append(mutation.name)
        figures["broken"] = {
            "files": len(cases),
            "exit_codes": sorted(codes),
            "without_place_key_or_suggestion": unnamed,
            "executed_anything": (folder / "canary").exists(),
            "loader_median_s": round(median(loader), 3),
            "loader_max_s": round(max(loader), 3),
        }
    with tempfile.TemporaryDirectory() as name:
        before = time.process_time()
        verdicts = list(judged(SEED, SPOILT, Path(name)))
        figures["shipped_with_a_mistake"] = {
            "shipped": len(shipped()),
            "files": len(verdicts),
            "still_valid": sum(verdict.code == 0 for verdict in verdicts),
            "refused": sum(verdict.code == 2 for verdict in verdicts),
            "bad": [f"{verdict.spoilt.of}, {verdict.spoilt.edit}" for verdict in verdicts if not verdict.good],
            "cpu_s_each": round((time.process_time() - before) / len(verdicts), 4),
        }
    write_result("config_errors", figures)
    print(figures)


if __name__ == "__main__":
    main()
