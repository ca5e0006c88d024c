"""Does a run of 10,000 steps stay as small and as fast as it was? The real command, engine, trainer and recorder.

A step is two episodes of a tiny model, so nearly all of it is what AgentJet itself does. Every two seconds the resident
memory of the run's process is read, with the step that it has reached; the slope is that of a straight line through the
second half. A run of 100 steps is made beside it, and the charts of both are opened in Chromium.

    python benchmarks/long_run.py [--steps 10000]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import ROOT, ajet_command, write_result
from playwright.sync_api import Page, sync_playwright

SHORT = 100
LOOK_EVERY_S = 2.0
OPENINGS = 5

CONF = """
ajet:
  project_name: long_run
  experiment_name: {name}
  model: {{path: "tiny:qwen2-0.3m"}}
  task_reader: {{type: jsonl_dataset_file, jsonl_dataset_file: {{training: {{file_path: {folder}/tasks.jsonl}}}}}}
  data: {{train_batch_size: 1, max_prompt_length: 128, max_response_length: 4}}
  rollout:
    user_workflow: {folder}/agent.py->Drawn
    num_repeat: 2
    max_response_length_in_one_turn: 4
    max_model_len: 256
    compute_madness_checklist: []
  failure_reward: {{truncated: judge}}
  recorder: {{max_gb: 0.05}}
  trainer_common:
    total_training_steps: {steps}
    val_before_train: false
    test_freq: 0
    save_freq: 0
    logger: [file]
"""

AGENT = '''
"""One model call; the reward is drawn."""

import random

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class Drawn(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(messages=[{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(reward=random.random())
'''


def train(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """One run: what its process held, and how long its steps took."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"question": f"Question {n}?"}) + "\n" for n in range(1000)))
    conf = folder / f"{name}.yaml"
    conf.write_text(CONF.format(name=name, folder=folder, steps=steps))
    command = ajet_command(conf, folder / "runs")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    samples = []
    with (folder / f"{name}.log").open("w") as log:
        run = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        process, file = psutil.Process(run.pid), folder / "runs" / name / "metrics.jsonl"
        while run.poll() is None:
            time.sleep(LOOK_EVERY_S)
            if (step := _last_step(file)) and run.poll() is None:
                samples.append((step, process.memory_info().rss / 2**20, process.num_threads(), process.num_fds()))
    if run.returncode:
        raise SystemExit((folder / f"{name}.log").read_text()[-3000:])
    seconds = [line["time/step"] for line in map(json.loads, file.open()) if "time/step" in line]
    return {"samples": samples, "seconds": seconds}


def _last_step(file: Path) -> int:
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 20_000))
        whole = [line for line in lines.read().split(b"\n")[:-1] if line.startswith(b"{")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def page_seconds(runs: Path, names: list[str]) -> dict[str, float]:
    """Median seconds until a run's charts are on the screen."""
    server = subprocess.Popen(
        [sys.executable, "-m", "ajet", "view", str(runs), "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        base = url[: url.index("/", len("http://"))]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(url)
            found = {
                name: statistics.median(_opened(page, f"{base}/x/{name}/charts") for _ in range(OPENINGS))
                for name in names
            }
            browser.close()
        return found
    finally:
        server.terminate()
        server.wait()


def _opened(page: Page, url: str) -> float:
    began = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_selector(".chart canvas")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    steps: int = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train(folder, "short", SHORT)
        found = train(folder, "long", steps)
        pages = page_seconds(folder / "runs", ["short", "long"])
    later = [sample for sample in found["samples"] if sample[0] > steps / 2]
    at, memory, threads, files = (list(column) for column in zip(*later, strict=True))
    seconds, part = found["seconds"], max(SHORT, steps // 20)
    figures = {
        "steps": steps,
        "mb_per_1000_steps": round(float(np.polyfit(at, memory, 1)[0]) * 1000, 3),
        "resident_mb": {
            str(step): round(mb) for step, mb, _, _ in found["samples"][:: max(1, len(found["samples"]) // 20)]
        },
        "threads": [min(threads), max(threads)],
        "file_descriptors": [min(files), max(files)],
        "step_seconds": {"first": _median(seconds[SHORT : SHORT + part]), "last": _median(seconds[-part:])},
        "charts_open_seconds": {f"{SHORT} steps": round(pages["short"], 3), f"{steps} steps": round(pages["long"], 3)},
    }
    print(write_result("long_run", figures), json.dumps(figures, indent=1))


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


if __name__ == "__main__":
    main()
