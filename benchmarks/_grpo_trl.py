"""TRL's side of `grpo_step.py`, in its own environment. Prints one JSON line.

python _grpo_trl.py MODEL STEPS THREADS
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time

import torch
from _grpo_task import EPISODES_PER_TASK, QUESTIONS, TASKS_PER_STEP, calculator, expression, question
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


def random_reward(completions: list, **_: object) -> list[float]:
    return [random.random() for _ in completions]


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.time())


def main() -> None:
    folder, steps, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = qwen3_template
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=TASKS_PER_STEP * EPISODES_PER_TASK,
            num_generations=EPISODES_PER_TASK,
            max_completion_length=128,
            temperature=1.0,
            learning_rate=1e-6,
            beta=0.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=random_reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": question(expression(rng))} for _ in range(QUESTIONS)]),
            processing_class=tokenizer,
            tools=[calculator],
            callbacks=[clock],
        )
        with open(os.devnull, "w") as devnull:
            shown, sys.stdout = sys.stdout, devnull
            trainer.train()
            sys.stdout = shown
    history = [record for record in trainer.state.log_history if "completions/mean_length" in record]
    print(
        json.dumps(
            {
                "ends": clock.ends,
                "calls_per_episode": 1.0 + sum(r["tools/call_frequency"] for r in history) / len(history),
                "completion_tokens": sum(r["completions/mean_length"] for r in history) / len(history),
            }
        )
    )


if __name__ == "__main__":
    main()
