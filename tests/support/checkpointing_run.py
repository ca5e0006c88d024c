"""A run with a fast fake model that saves a checkpoint each step and announces it. Killed from outside, at any moment.

python checkpointing_run.py FOLDER STEPS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ajet.trainer.checkpoint import CheckpointFolder


def main(root: Path, steps: int) -> None:
    folder = CheckpointFolder(root, keep=2)
    found = folder.newest()
    weights = np.zeros(20_000)
    step = 0
    if found is not None:
        weights = load_file(found.path / "hf" / "model.safetensors")["w"]
        step = found.step
        assert (weights == step).all(), f"checkpoint {found.path} holds the weights of another step"
    print(f"resumed {step}", flush=True)
    while step < steps:
        step += 1
        weights = weights + 1.0

        def write(path: Path, now: Any = weights) -> None:
            (path / "hf").mkdir()
            save_file({"w": now}, path / "hf" / "model.safetensors")
            save_file({"m": now}, path / "optimizer.safetensors")

        if folder.save(step, {"score": float(step % 3)}, write) is not None:
            print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
