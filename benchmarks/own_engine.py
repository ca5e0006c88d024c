"""The quickstart with the embedded engine, with vLLM, and with vLLM one step ahead of the trainer, on a CPU.

    python benchmarks/own_engine.py [FOLDER] [--only torch,vllm,overlap]

Needs vLLM's CPU build (`make test-vllm` installs it; AJET_VLLM_PYTHON names another). Trainer and engine have one
thread each. FOLDER keeps the runs: one that is complete is not run again, one that was stopped is continued.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from _quickstart_run import ENVIRONMENT, conduct, trained
from common import ROOT, known_figures, write_result

VLLM_PYTHON = Path(os.environ.get("AJET_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
CPU = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
VLLM = (
    "rollout.engine=vllm",
    f"rollout.vllm.python={VLLM_PYTHON}",
    "rollout.vllm.extra_args=[--max-num-batched-tokens,'32768']",
    "rollout.vllm.start_timeout=1800",
)
ARMS: dict[str, tuple[str, ...]] = {
    "torch": (),
    "vllm": VLLM,
    "overlap": (*VLLM, "rollout.max_staleness=1"),
}


def measure(arm: str, folder: Path) -> dict[str, Any]:
    """One run: its curve, its pace, and how far the engine's logprobs are from the trainer's."""
    run = conduct("local", Path(ROOT / ".venv/bin/python"), folder, *ARMS[arm])
    steps = trained(folder / "quickstart" / "metrics.jsonl")
    steady = steps[1:]  # the first step also waits for what is imported and compiled late
    run["steps_per_minute"] = 60 * len(steady) / sum(step["time/step"] for step in steady)
    for name in ("time/rollout", "time/train", "time/sync", "time/rollout_wait", "train/staleness"):
        values = [step[name] for step in steady if name in step]
        if values:
            run[f"mean_{name}"] = sum(values) / len(values)
    run["largest_sampler_gap_of_step_1"] = steps[0]["loss/sampler_gap_max"]
    run["largest_sampler_gap"] = max(step["loss/sampler_gap_max"] for step in steps)
    run["largest_staleness"] = max(step["train/staleness/max"] for step in steps)
    run["load_average"] = os.getloadavg()[1]
    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", default=",".join(ARMS))
    arguments = parser.parse_args()
    if not VLLM_PYTHON.exists():
        print("left out: there is no .venv-vllm (`make test-vllm` builds it)")
        return
    ENVIRONMENT.update(CPU)
    root = arguments.folder or Path(tempfile.mkdtemp(prefix="ajet-own-engine-"))
    figures = known_figures("own_engine")
    try:
        for arm in arguments.only.split(","):
            began = time.perf_counter()
            figures[arm] = measure(arm, root / arm)
            print(f"{arm}: {figures[arm]['validation']}, {time.perf_counter() - began:.0f} s", flush=True)
            print(write_result("own_engine", figures))
    finally:
        if arguments.folder is None:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
