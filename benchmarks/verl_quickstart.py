"""The quickstart on verl and on the embedded trainer, on the CPU, with the same YAML: is the curve the same?

`python benchmarks/verl_quickstart.py [FOLDER]`; needs `.venv-verl` (`make test-verl` builds it). FOLDER keeps the runs:
one that is complete is not run again.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from _quickstart_run import conduct, draw
from common import ROOT, write_result

VERL_PYTHON = ROOT / ".venv-verl" / "bin" / "python"
CHART = ROOT / "docs" / "assets" / "verl_reward.png"


def main() -> None:
    if not VERL_PYTHON.exists():
        print("left out: there is no .venv-verl (`make test-verl` builds it)")
        return
    keep = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    root = keep or Path(tempfile.mkdtemp(prefix="ajet-verl-"))
    try:
        pythons = {"local": Path(sys.executable), "verl": VERL_PYTHON}
        runs = {backbone: conduct(backbone, python, root / backbone) for backbone, python in pythons.items()}
    finally:
        if keep is None:
            shutil.rmtree(root)
    pairs = zip(runs["local"]["validation"].values(), runs["verl"]["validation"].values(), strict=True)
    figures = {**runs, "largest_validation_difference": max(abs(one - other) for one, other in pairs)}
    draw(runs, CHART)
    print(write_result("verl", figures))


if __name__ == "__main__":
    main()
