"""Makes what the quickstart starts from: its tasks, and a tiny model trained to imitate demonstrations.

The demonstrations are of mixed quality on purpose: two in five use the calculator, and the others guess wrong.
Imitation learns both habits; reinforcement learning finds out which one pays.

    python tutorial/example_math_agent/quickstart/make_cold_start.py          # about 6 minutes on one core
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

MODEL = "tiny:qwen2-0.3m"
SIZES = {"train": 1024, "validation": 128}
DEMONSTRATIONS = 16_384
SHARE_WITH_CALCULATOR = 0.4
BATCH = 64
LEARNING_RATE = 3e-3
TAGS = {"+": "sum", "-": "difference", "*": "product"}


def problem(rng: random.Random) -> tuple[str, str, int]:
    """A question, its operator and its answer."""
    from workflow import calculator

    one, other = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in rng.choices([1, 2, 2, 3, 3], k=2))
    operator = rng.choice("+-*")
    return f"What is {one}{operator}{other}?", operator, int(calculator(f"{one}{operator}{other}"))


def write_tasks(rng: random.Random) -> set[str]:
    """Write both task files. Returns the validation questions, which no demonstration may contain."""
    seen: set[str] = set()
    held_out: set[str] = set()
    (FOLDER / "data").mkdir(exist_ok=True)
    for split in ("validation", "train"):
        lines = []
        while len(lines) < SIZES[split]:
            question, operator, answer = problem(rng)
            if question in seen:
                continue
            seen.add(question)
            record = {
                "id": f"{split}-{len(lines):04}",
                "question": question,
                "answer": str(answer),
                "tag": TAGS[operator],
            }
            lines.append(json.dumps(record))
        if split == "validation":
            held_out = set(seen)
        (FOLDER / "data" / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return held_out


def demonstration(rng: random.Random, held_out: set[str]) -> list[dict[str, Any]]:
    """A conversation in which the agent uses the calculator or guesses."""
    from workflow import SYSTEM_PROMPT

    question, _, answer = problem(rng)
    while question in held_out:
        question, _, answer = problem(rng)
    expression = question.removeprefix("What is ").removesuffix("?")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    if rng.random() < SHARE_WITH_CALCULATOR:
        function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        call = {"id": "call_0", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": str(answer)})
    else:
        answer += rng.choice([-100, -10, -9, -2, -1, 1, 2, 9, 10, 100])
    messages.append({"role": "assistant", "content": f"\\boxed{{{answer}}}"})
    return messages


def train(steps: int, seed: int, folder: Path) -> None:
    """Fine-tune the untrained model on the demonstrations and save it as a Hugging Face folder."""
    import torch
    from workflow import TOOLS

    from ajet.backbone.local.demonstrations import replay
    from ajet.context_tracker import Renderer
    from ajet.engine.model_source import ModelSource
    from ajet.trainer.checkpoint import write_model
    from ajet.trainer.credit import CreditSettings, imitation_credit, summarise
    from ajet.trainer.loss import LossSettings, PolicyLoss
    from ajet.trainer.optimizer import OptimSettings
    from ajet.trainer.trainer import TrainSettings, Updater

    rng = random.Random(seed)
    held_out = write_tasks(rng)
    source = ModelSource.resolve(MODEL)
    renderer = Renderer(source.tokenizer())
    model = source.model(device="cpu")
    episodes = []
    for number in range(DEMONSTRATIONS):
        episodes.append(replay(renderer, demonstration(rng, held_out), TOOLS, name=f"demonstration-{number}"))
    print(f"{len(episodes)} demonstrations", flush=True)
    optim = OptimSettings(
        lr=LEARNING_RATE, betas=(0.9, 0.98), warmup_steps=50, schedule="cosine", total_steps=steps, clip_grad=1.0
    )
    trainer = Updater(model, TrainSettings(LossSettings(PolicyLoss.SFT), optim))
    for step in range(steps):
        chosen = rng.sample(episodes, BATCH)
        credit = imitation_credit([[summarise(episode) for episode in chosen]], CreditSettings())
        metrics = trainer.update([(e.tree, c) for e, c in zip(chosen, credit.episodes, strict=True)])
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}  loss {metrics['loss/policy']:.4f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        write_model(model.to(torch.bfloat16), source.tokenizer(), Path(scratch))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(scratch) / "hf", folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=FOLDER / "cold_start")
    arguments = parser.parse_args()
    train(arguments.steps, arguments.seed, arguments.out)
