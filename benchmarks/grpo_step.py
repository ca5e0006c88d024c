"""A whole GRPO step of a multi-turn tool agent on a CPU: the local backbone compared with TRL's `GRPOTrainer(tools=…)`.

Both sides have the same model (0.66 M parameters), questions, tool and batch (8 tasks x 8 episodes of two turns), use
float32, make one update per step, and draw rewards at random. AgentJet runs as a user would run it: `ajet --conf …`, an
agent written with the OpenAI client, episodes and metrics recorded. TRL needs its own environment (`pip install
trl==1.16.0 jmespath`).

    python benchmarks/grpo_step.py --trl-python /path/to/its/bin/python [--steps 12] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from _grpo_task import EPISODES_PER_TASK, MAX_REPLY, QUESTIONS, TASKS_PER_STEP, TOOL, demonstration, expression
from common import ajet_command, output_of, write_result

from ajet.observe.metrics import read_metrics

HERE = Path(__file__).parent
IMITATION_STEPS = 300

CONF = """
ajet:
  project_name: grpo_step
  experiment_name: {name}
  model: {{path: {model}}}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {{training: {{file_path: {tasks}}}}}
  data: {{max_prompt_length: 320, max_response_length: 256, train_batch_size: {batch}}}
  rollout:
    user_workflow: {agent}->CalculatorAgent
    num_repeat: {repeat}
    temperature: 1.0
    max_model_len: 576
    max_response_length_in_one_turn: {reply}
    max_num_seqs: 64
    compute_madness_checklist: []
  trainer_common:
    total_training_steps: {steps}
    val_before_train: false
    test_freq: 0
    save_freq: 0
    use_kl_loss: false
    optim: {{lr: 1.0e-6}}
    logger: [file]
"""


def make_model(folder: Path) -> None:
    """A model that calls the tool and then answers: a short imitation of demonstrations."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from ajet.backbone.local.demonstrations import replay
    from ajet.context_tracker import Renderer
    from ajet.engine.model_source import ModelSource
    from ajet.trainer import loss as losses
    from ajet.trainer.checkpoint import write_model
    from ajet.trainer.credit import CreditSettings, imitation_credit, summarise
    from ajet.trainer.loss import LossSettings
    from ajet.trainer.optimizer import OptimSettings
    from ajet.trainer.trainer import TrainSettings, Updater

    torch.manual_seed(0)
    rng = random.Random(1)
    source = ModelSource.resolve("tiny:qwen2-0.3m")
    tokenizer = source.tokenizer()
    config: Any = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    renderer = Renderer(tokenizer)
    episodes = [replay(renderer, demonstration(rng), [TOOL], name=f"demonstration-{n}") for n in range(2048)]
    optim = OptimSettings(
        lr=3e-3, betas=(0.9, 0.98), warmup_steps=30, schedule="cosine", total_steps=IMITATION_STEPS, clip_grad=1.0
    )
    trainer = Updater(model, TrainSettings(LossSettings(losses.SFT), optim))
    for step in range(IMITATION_STEPS):
        chosen = rng.sample(episodes, 32)
        credit = imitation_credit([[summarise(episode) for episode in chosen]], CreditSettings())
        metrics = trainer.update([(e.tree, c) for e, c in zip(chosen, credit.episodes, strict=True)])
        if step % 50 == 0:
            print(f"making the model: step {step}, loss {metrics['loss/policy']:.3f}", flush=True)
    write_model(model, tokenizer, folder)


def write_job(name: str, model: Path, folder: Path, steps: int) -> Path:
    """The file of a run of our agent, and its tasks."""
    rng = random.Random(0)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": expression(rng)}) + "\n" for _ in range(QUESTIONS)))
    conf = folder / f"{name}.yaml"
    conf.write_text(
        CONF.format(
            name=name,
            model=model,
            tasks=tasks,
            agent=HERE / "_grpo_agent.py",
            batch=TASKS_PER_STEP,
            repeat=EPISODES_PER_TASK,
            reply=MAX_REPLY,
            steps=steps,
        )
    )
    return conf


def run_ours(model: Path, folder: Path, steps: int, threads: int) -> dict[str, Any]:
    name = f"threads_{threads}"
    conf = write_job(name, model, folder, steps)
    began = time.time()
    output_of(ajet_command(conf, folder, "--fresh"), threads)
    metrics = read_metrics(folder / name / "metrics.jsonl")
    return {
        **_summary(began, [step["time"] for step in metrics]),
        "rollout": statistics.median(step["time/rollout"] for step in metrics[1:]),
        "train": statistics.median(step["time/train"] for step in metrics[1:]),
        "calls_per_episode": statistics.mean(step["episode/calls"] for step in metrics),
        "packing_ratio": statistics.mean(step["tokens/packing_ratio"] for step in metrics),
    }


def run_trl(python: str, model: Path, steps: int, threads: int) -> dict[str, Any]:
    began = time.time()
    out = output_of([python, str(HERE / "_grpo_trl.py"), str(model), str(steps), str(threads)], threads)
    said: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return {**_summary(began, said.pop("ends")), **said}


def _summary(began: float, ends: list[float]) -> dict[str, Any]:
    """From one step's end to the next one's: everything that happens is in it."""
    seconds = [after - before for before, after in pairwise(ends)]
    return {
        "step_seconds": statistics.median(seconds),
        "first_step_done": ends[0] - began,
        "all_step_seconds": [round(value, 3) for value in seconds],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python", help="an interpreter that has trl 1.16; without it, only ours is measured")
    parser.add_argument("--model", type=Path, help="where the model is kept between runs")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prepare", action="store_true", help="make the model, and no more")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kept = arguments.model or folder / "model"
        if not (kept / "hf").is_dir():
            make_model(kept)
        if arguments.prepare:
            return
        figures: dict[str, Any] = {"episodes_per_step": TASKS_PER_STEP * EPISODES_PER_TASK}
        for threads in arguments.threads:
            found = {"ajet": run_ours(kept / "hf", folder, arguments.steps, threads)}
            if arguments.trl_python:
                trl = found["trl"] = run_trl(arguments.trl_python, kept / "hf", arguments.steps, threads)
                found["speedup"] = {"ajet": trl["step_seconds"] / found["ajet"]["step_seconds"]}
            figures[f"{threads} thread{'s' if threads > 1 else ''}"] = found
            print(json.dumps({str(threads): found}, indent=1), flush=True)
    if arguments.trl_python:
        write_result("grpo_step", figures)


if __name__ == "__main__":
    main()
