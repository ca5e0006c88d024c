"""SIGKILL at random moments, also inside a checkpoint: 200 kills of a run with a fast fake model.

Every one must resume, and never older than the last announced step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from common import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trainer"))

from test_checkpoint import kill_and_resume

KILLS = 200


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kill_and_resume(Path(folder), KILLS, seed=2)
    write_result("kills", {"kills": KILLS, "lost": 0, "seconds": time.perf_counter() - began})
    print(f"{KILLS} kills, nothing announced was lost")


if __name__ == "__main__":
    main()
