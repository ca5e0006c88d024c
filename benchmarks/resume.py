"""Are 100 uninterrupted steps bit-for-bit the same as 50 steps, kill -9, and the same command again?

Both are whole runs of the local backbone on a tiny real model, in `deterministic` mode, with a checkpoint every 10
steps. Rewards, losses, gradient norms and token counts of every step are compared, and the hash of the final weights.

    python benchmarks/resume.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, ajet_command, write_result

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "backbone" / "local")]

from test_local import STABLE, config_file, stable, weights_hash

STEPS, KILLED_AFTER, SAVE_EVERY = 100, 50, 10


def conduct(folder: Path, *, kill: bool) -> tuple[list[dict[str, float]], str]:
    """Metrics of all steps, and the hash of the weights."""
    folder.mkdir()
    yaml, _ = config_file(folder)
    settings = [f"trainer_common.total_training_steps={STEPS}", f"trainer_common.save_freq={SAVE_EVERY}"]
    command = ajet_command(yaml, folder / "runs", *settings, "trainer_common.test_freq=0")
    experiment = folder / "runs" / "job"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kill:
        process = subprocess.Popen(command, env=environment)
        while len(stable(experiment)) < KILLED_AFTER:
            if process.poll() is not None:
                raise SystemExit("the run ended before it was killed")
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, env=environment, check=True)
    return stable(experiment), weights_hash(experiment)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        straight = conduct(Path(scratch) / "straight", kill=False)
        killed = conduct(Path(scratch) / "killed", kill=True)
    same = straight == killed
    figures = {
        "steps": STEPS,
        "killed_after": KILLED_AFTER,
        "compared_each_step": list(STABLE),
        "steps_recorded": len(straight[0]),
        "weights": {"straight": straight[1], "killed": killed[1]},
        "identical": same,
    }
    verdict = "same" if same else "NOT THE SAME"
    print(f"{len(straight[0])} steps, weights {straight[1][:12]} and {killed[1][:12]}: {verdict}")
    write_result("resume", figures)
    if not same:
        raise SystemExit("a killed run did not become the run that never stopped")


if __name__ == "__main__":
    main()
