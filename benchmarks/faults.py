"""1,000 episodes of which 30 % fail: the run completes, and every failure is counted under its type.

Gateway, sessions, tracker, pool and threads or processes are real; only the model's replies are scripted.
Usage: python benchmarks/faults.py [episodes]
"""

from __future__ import annotations

import sys
from pathlib import Path

from common import write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.faulty_run import run


def main() -> None:
    episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    figures = {
        "threads": run(episodes, isolated=False, parallel=64),
        "processes": run(episodes, isolated=True, parallel=16),
    }
    for name, result in figures.items():
        print(name, result)
        if result["wrong"] or result["episodes"] != episodes or result["rewards_of_failed"]:
            raise SystemExit(f"{name}: failures were lost or counted under another type")
    write_result("faults", figures)


if __name__ == "__main__":
    main()
