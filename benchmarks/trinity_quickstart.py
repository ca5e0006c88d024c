"""The quickstart on Trinity and on the embedded trainer, on the CPU, with the same YAML: does the reward rise the same
way, and does each update move the right tokens?

The Trinity run keeps the weights of every step. The tokens of each training episode are read again under the weights
before and after the update: those of better episodes must become likelier, those of worse ones less likely.

`python benchmarks/trinity_quickstart.py [FOLDER]`; needs `.venv-trinity` (`make test-trinity` builds it). FOLDER keeps
the runs: one that is complete is not run again.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from _quickstart_run import STEPS, conduct, draw, trained
from common import ROOT, write_result

sys.path.insert(0, str(ROOT / "tests"))

from support.logprob_change import changes, summary

TRINITY_PYTHON = ROOT / ".venv-trinity" / "bin" / "python"
CHART = ROOT / "docs" / "assets" / "trinity_reward.png"
START = ROOT / "tutorial" / "example_math_agent" / "quickstart" / "cold_start"
KEEP = ("trainer_common.save_freq=1", f"trainer_common.keep_checkpoints={STEPS}")
PARTS = 4


def main() -> None:
    if not TRINITY_PYTHON.exists():
        print("left out: there is no .venv-trinity (`make test-trinity` builds it)")
        return
    keep = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    root = keep or Path(tempfile.mkdtemp(prefix="ajet-trinity-"))
    try:
        runs = {
            "local": conduct("local", Path(sys.executable), root / "local"),
            "trinity": conduct("trinity", TRINITY_PYTHON, root / "trinity", *KEEP),
        }
        chain = logprob_changes(root / "trinity" / "quickstart")
    finally:
        if keep is None:
            shutil.rmtree(root)
    draw(runs, CHART)
    print(write_result("trinity", {**runs, "logprob_change": chain}))


def logprob_changes(experiment: Path) -> dict[str, Any]:
    """Over all steps, and over each quarter of them."""
    saved = experiment.glob("checkpoints/*/run/step_*/hf")
    weights = {0: START} | {int(folder.parent.name.removeprefix("step_")): folder for folder in saved}
    found = changes(experiment / "episodes.sqlite", weights)
    length = STEPS // PARTS
    parts = {
        f"steps {begin + 1} to {begin + length}": summary(one for one in found if begin < one.step <= begin + length)
        for begin in range(0, STEPS, length)
    }
    staleness = [step["train/staleness/max"] for step in trained(experiment / "metrics.jsonl")]
    return {"all": summary(found), **parts, "largest_staleness": max(staleness)}


if __name__ == "__main__":
    main()
