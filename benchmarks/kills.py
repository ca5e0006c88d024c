"""Kills a run with a fast fake model 200 times at random moments, also while it writes a checkpoint.

It must resume every time, and never from before the last step it announced.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from common import write_result

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "trainer")]

from test_checkpoint import kill_and_resume

KILLS = 200


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        inside = kill_and_resume(Path(folder), KILLS, seed=2)
    seconds = time.perf_counter() - began
    write_result("kills", {"kills": KILLS, "inside_a_checkpoint": inside, "lost": 0, "seconds": seconds})
    print(f"{KILLS} kills, {inside} of them inside a checkpoint; nothing announced was lost")


if __name__ == "__main__":
    main()
