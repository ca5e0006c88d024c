"""Does memory stay flat in a long run? 100,000 episodes on the local backbone, with scripted replies.

Everything but the model and the optimiser is real: pool, threads, sessions, tracker, credit, metrics and the recorder.
Memory is the resident set of this process after every 5,000 episodes. Its slope is taken from a straight line through
the second half of the run, when caches are full. Open file descriptors and threads are counted too.

    python benchmarks/memory_slope.py [--episodes 100000]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from common import write_result

import ajet.backbone.local.loop as loop
from ajet.backbone import LaunchOptions
from ajet.config.loader import load_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedCall, ScriptedEngine
from ajet.observe.experiment import ExperimentFolder
from ajet.schema.episode import Episode
from ajet.task_runner.runtime import Runtime

GROUPS, REPEAT = 25, 8
SAMPLE_EVERY = 5_000
MAX_MB_PER_10K = 1.0
WARM_SHARE = 0.5

CONF = """
ajet:
  project_name: memory
  experiment_name: memory
  model: {{path: "tiny:qwen2-0.3m"}}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {{training: {{file_path: {tasks}}}}}
  data: {{train_batch_size: {groups}, max_prompt_length: 256, max_response_length: 256}}
  rollout:
    user_workflow: {agent}->CountingAgent
    num_repeat: {repeat}
    max_model_len: 512
    max_env_worker: 16
    compute_madness_checklist: []
  recorder: {{max_gb: 0.02}}
  trainer_common:
    total_training_steps: {steps}
    val_before_train: false
    test_freq: 0
    save_freq: 0
    use_kl_loss: false
    logger: [file]
"""

AGENT = '''
"""One call of a plain OpenAI client; the reward is drawn."""

import random

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask


class CountingAgent(Workflow):
    name: str = "counting_agent"

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client = tuner.as_raw_openai_sdk_client()
        messages = [{"role": "user", "content": workflow_task.task.main_query}]
        await client.chat.completions.create(model="any", messages=messages)
        return WorkflowOutput(reward=random.random())
'''


class NoLearner:
    """Takes the place of the model's trainer: an update that changes nothing."""

    def __init__(self, config: Any, given: Any, total_steps: int) -> None:
        self.tokenizer = given.model().tokenizer
        self.trainer = self
        self.updates = 0

    def update(self, episodes: Sequence[Episode], credit: Any, version: int) -> dict[str, float]:
        self.updates += 1
        return {"train/updates": 1.0}

    def logprobs_before(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        return {}

    def write(self, folder: Path) -> None:
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")


class Watch:
    """Looks at this process after every so many episodes."""

    def __init__(self) -> None:
        self.samples: list[dict[str, float]] = []
        self.steps = 0
        self.began = time.perf_counter()

    def step(self) -> None:
        """To be called after each step."""
        self.steps += 1
        episodes = self.steps * GROUPS * REPEAT
        if episodes % SAMPLE_EVERY == 0:
            gc.collect()
            self.samples.append(
                {
                    "episodes": episodes,
                    "rss_mb": _rss_mb(),
                    "file_descriptors": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "seconds": time.perf_counter() - self.began,
                }
            )
            print(json.dumps(self.samples[-1]), flush=True)


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS")


def speak(call: ScriptedCall) -> str:
    return f"Reply {call.index} says {random.randrange(10**6)}."


def conduct(folder: Path, steps: int) -> Watch:
    """The run, with scripted replies."""
    watch = Watch()
    (folder / "agent.py").write_text(AGENT)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"Question {n}?"}) + "\n" for n in range(1000)))
    conf = folder / "memory.yaml"
    text = CONF.format(tasks=tasks, groups=GROUPS, agent=folder / "agent.py", repeat=REPEAT, steps=steps)
    conf.write_text(text)
    config = load_config(conf, backbone="local")

    class Watched(loop.LocalRun):
        def _note(self, metrics: dict[str, float]) -> None:
            super()._note(metrics)
            watch.step()

    tokenizer = ModelSource.resolve(config.ajet.model.path).tokenizer()
    engine = ScriptedEngine(speak, tokenizer)
    Runtime.__init__.__kwdefaults__["make_engine"] = lambda _: engine
    loop.Learner = NoLearner  # type: ignore[misc, assignment]
    with ExperimentFolder.open(config, exp_dir=folder / "runs", source_yaml=conf, fresh=True) as experiment:
        Watched(config, experiment, LaunchOptions(quiet=True)).run()
    return watch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        watch = conduct(Path(scratch), arguments.episodes // (GROUPS * REPEAT))
    samples = watch.samples
    warm = [sample for sample in samples if sample["episodes"] > arguments.episodes * WARM_SHARE]
    slope = float(np.polyfit([s["episodes"] for s in warm], [s["rss_mb"] for s in warm], 1)[0]) * 10_000
    spread = {key: [min(s[key] for s in warm), max(s[key] for s in warm)] for key in ("file_descriptors", "threads")}
    figures = {"episodes": arguments.episodes, "mb_per_10k_episodes": slope, **spread, "samples": samples}
    print(f"{slope:.2f} MB per 10,000 episodes; {spread}")
    write_result("memory_slope", figures)
    if slope >= MAX_MB_PER_10K:
        raise SystemExit("memory grows")


if __name__ == "__main__":
    main()
