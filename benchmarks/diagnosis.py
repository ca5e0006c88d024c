"""Does `ajet diagnose` name the fault of a broken run first, and none in a healthy one?

The rules were made on ten faults of one task, the quickstart (`calibration`), and then tried on 15 broken runs of four
other tasks with other seeds (`broken`). Rules were changed for the misses, and tried on further runs (`second`), and
so on up to the `tenth`: the file keeps under `at_first` what the rules named as they were before each round. Ten runs
are `healthy`. Each is a whole `local` run of a few steps in a separate process.

    python benchmarks/diagnosis.py [--only calibration|broken|…|tenth|healthy|NAME …] [--keep FOLDER]

FOLDER keeps the runs: one that is complete is diagnosed again without being run again. With `--only`, these runs'
figures replace the ones in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import known_figures, write_result

HERE = Path(__file__).parent
ROOT = HERE.parent
FAULTS = HERE / "_diagnosis_faults.py"
LAKE = ROOT / "tutorial/example_frozenlake/frozenlake.yaml"
COLD_START = ROOT / "tutorial/example_countdown/cold_start.yaml"
CONFS = {
    "maths": (ROOT / "configs/quickstart.yaml", "Maths", 10),
    "agent": (ROOT / "configs/quickstart_agent.yaml", "", 10),
    "countdown": (ROOT / "tutorial/example_countdown/countdown.yaml", "Countdown", 8),
    "lake": (LAKE, "Walk", 10),
    "vowels": (HERE / "_learning_runs.yaml", "Vowels", 10),
    "capitals": (HERE / "_learning_runs.yaml", "Capitals", 10),
}
"""The YAML, the workflow in its place, and how many steps."""
OTHER_TASKS = ROOT / "tutorial/example_math_agent/quickstart/data/validation.jsonl"
COLLAPSE = ("trainer_common.algorithm.entropy_coef=-10.0",)
DRIFT = ("trainer_common.use_kl_loss=true", "trainer_common.kl_loss_coef=1e-6")
OLD = ("trainer_common.algorithm.replay.groups=32", "trainer_common.algorithm.replay.max_age=8")
SMALL = ("data.train_batch_size=8", "rollout.num_repeat=8", "rollout.val_kwargs.num_repeat=1")
JUDGE = (
    f"task_judge.judge_protocol={FAULTS}->Scores",
    "rollout.episode_retries=0",
    "rollout.min_group_size=2",
    "task_judge.max_error_share=0.9",
)


def judged_by(name: str) -> tuple[str, ...]:
    return (f"task_judge.judge_protocol={FAULTS}->{name}", *JUDGE[1:])


@dataclass(frozen=True)
class Case:
    """A run, and the fault that must be named first; '' if none may be."""

    part: str
    task: str
    fault: str
    seed: int
    injected: str = "none"
    """`ajet.user.fault`: what the code does wrong."""
    overrides: tuple[str, ...] = ()
    steps: int = 0

    @property
    def name(self) -> str:
        return f"{self.part}-{self.task}-{self.fault or 'none'}-{self.seed}"


CASES = (
    Case("calibration", "maths", "no_variance", 1, "constant", steps=4),
    Case("calibration", "maths", "never_solved", 1, "unsolvable", steps=4),
    Case("calibration", "maths", "judge_errors", 1, "judge fails", JUDGE, 4),
    Case("calibration", "maths", "cut_replies", 1, "none", ("rollout.max_response_length_in_one_turn=10",), 4),
    Case("calibration", "maths", "entropy_collapse", 1, "none", (*COLLAPSE, "trainer_common.optim.lr=3e-3")),
    Case("calibration", "maths", "kl_growth", 1, "none", (*DRIFT, "trainer_common.optim.lr=3e-3")),
    Case("calibration", "maths", "sampler_gap", 1, "engine is off by 0.2", ("model.dtype=float32",), 4),
    Case("calibration", "maths", "dead_tool", 1, "tool fails", steps=4),
    Case("calibration", "maths", "gaming", 1, "pays for guesses"),
    Case("calibration", "maths", "staleness", 1, "none", OLD),
    Case("broken", "countdown", "no_variance", 11, "constant", steps=3),
    Case("broken", "lake", "never_solved", 12, "unsolvable", steps=4),
    Case("broken", "lake", "judge_errors", 13, "judge fails", JUDGE, 4),
    Case("broken", "countdown", "cut_replies", 14, "none", ("rollout.max_response_length_in_one_turn=3",), 4),
    Case("broken", "lake", "entropy_collapse", 15, "none", (*COLLAPSE, "trainer_common.optim.lr=3e-3")),
    Case("broken", "countdown", "kl_growth", 16, "none", (*DRIFT, "trainer_common.optim.lr=3e-3")),
    Case("broken", "lake", "sampler_gap", 17, "engine is off by 0.05", ("model.dtype=float32",), 4),
    Case("broken", "agent", "dead_tool", 18, "none", (f"rollout.agent.tools=[{FAULTS}->DeafCalculator]",), 4),
    Case("broken", "countdown", "gaming", 19, "pays for tries"),
    Case("broken", "lake", "staleness", 20, "none", OLD),
    Case("broken", "countdown", "length_drift", 21, "pays for length",
         ("rollout.max_response_length_in_one_turn=40", "rollout.temperature=1.3", "trainer_common.optim.lr=2e-3"), 16),
    Case("broken", "vowels", "part_dominates", 22, "a character counts 1", JUDGE, 6),
    Case("broken", "countdown", "validation_gap", 23, "none", (
        "task_reader.jsonl_dataset_file.validation.file_path={scratch}/four_numbers.jsonl",)),
    Case("broken", "lake", "always_solved", 24, "everything is right", steps=4),
    Case("broken", "vowels", "repeated_replies", 25, "pays for repetition",
         ("rollout.max_response_length_in_one_turn=24",), 20),
    Case("second", "lake", "no_variance", 51, "constant", steps=3),
    Case("second", "countdown", "never_solved", 52, "unsolvable", SMALL, 4),
    Case("second", "countdown", "judge_errors", 53, "judge fails", (*SMALL, *JUDGE), 4),
    Case("second", "countdown", "cut_replies", 54, "none",
         (*SMALL, "rollout.max_response_length_in_one_turn=2"), 4),
    Case("second", "vowels", "entropy_collapse", 55, "none", (*COLLAPSE, "trainer_common.optim.lr=1e-2"), 12),
    Case("second", "lake", "kl_growth", 56, "pays at random", (*DRIFT, "trainer_common.optim.lr=5e-3")),
    Case("second", "vowels", "sampler_gap", 57, "engine is off by 0.1", ("model.dtype=float32",), 4),
    Case("second", "agent", "dead_tool", 58, "none", (f"rollout.agent.tools=[{FAULTS}->DeafCalculator]",), 4),
    Case("second", "agent", "dead_tool", 59, "none", (f"rollout.agent.tools=[{FAULTS}->LostCalculator]",), 4),
    Case("second", "lake", "gaming", 60, "pays for falls"),
    Case("second", "vowels", "staleness", 61, "none", OLD),
    Case("second", "countdown", "length_drift", 62, "pays for length",
         (*SMALL, "rollout.max_response_length_in_one_turn=24", "trainer_common.optim.lr=2e-3"), 8),
    Case("second", "countdown", "part_dominates", 63, "a character counts 100", (*SMALL, *JUDGE), 6),
    Case("second", "agent", "validation_gap", 64, "none",
         ("task_reader.jsonl_dataset_file.validation.file_path={scratch}/three_factors.jsonl",)),
    Case("second", "countdown", "always_solved", 65, "everything is right", SMALL, 4),
    Case("second", "vowels", "repeated_replies", 66, "pays for repetition",
         ("rollout.max_response_length_in_one_turn=32",), 20),
    Case("third", "agent", "dead_tool", 71, "none", (f"rollout.agent.tools=[{FAULTS}->DeafCalculator]",), 4),
    Case("third", "agent", "dead_tool", 72, "none", (f"rollout.agent.tools=[{FAULTS}->LostCalculator]",), 4),
    Case("third", "lake", "gaming", 73, "pays for falls"),
    Case("third", "countdown", "gaming", 74, "pays for tries", SMALL),
    Case("third", "vowels", "staleness", 75, "none", OLD),
    Case("third", "countdown", "staleness", 76, "none", (*SMALL, *OLD)),
    Case("third", "countdown", "entropy_collapse", 77, "none",
         (*SMALL, *COLLAPSE, "trainer_common.optim.lr=3e-3")),
    Case("third", "maths", "length_drift", 78, "pays for length", ("trainer_common.optim.lr=1e-3",)),
    Case("fourth", "vowels", "no_variance", 91, "constant", steps=3),
    Case("fourth", "vowels", "never_solved", 92, "unsolvable", steps=4),
    Case("fourth", "lake", "judge_errors", 93, "judge fails", JUDGE, 4),
    Case("fourth", "agent", "cut_replies", 94, "none", ("rollout.max_response_length_in_one_turn=6",), 4),
    Case("fourth", "countdown", "entropy_collapse", 95, "none",
         (*SMALL, *COLLAPSE, "trainer_common.optim.lr=2e-3"), 10),
    Case("fourth", "vowels", "kl_growth", 96, "none", (*DRIFT, "trainer_common.optim.lr=1e-2"), 12),
    Case("fourth", "countdown", "sampler_gap", 97, "engine is off by 0.1", (*SMALL, "model.dtype=float32"), 4),
    Case("fourth", "agent", "dead_tool", 98, "none", (f"rollout.agent.tools=[{FAULTS}->LostCalculator]",), 4),
    Case("fourth", "countdown", "gaming", 99, "pays for tries", SMALL),
    Case("fourth", "lake", "staleness", 100, "none", OLD),
    Case("fourth", "countdown", "length_drift", 101, "pays for length",
         ("rollout.max_response_length_in_one_turn=40", "rollout.temperature=1.3", "trainer_common.optim.lr=2e-3"), 16),
    Case("fourth", "vowels", "part_dominates", 102, "a character counts 10", JUDGE, 6),
    Case("fourth", "countdown", "validation_gap", 103, "none", (
        *SMALL, "task_reader.jsonl_dataset_file.validation.file_path={scratch}/four_numbers.jsonl",)),
    Case("fourth", "vowels", "always_solved", 104, "everything is right", steps=4),
    Case("fourth", "vowels", "repeated_replies", 105, "pays for repetition",
         ("rollout.max_response_length_in_one_turn=28",), 20),
    Case("fifth", "agent", "no_variance", 111, "always 0.7", judged_by("Always"), 4),
    Case("fifth", "countdown", "never_solved", 112, "none",
         (*SMALL, "task_reader.jsonl_dataset_file.training.file_path={scratch}/impossible.jsonl"), 4),
    Case("fifth", "agent", "judge_errors", 113, "none", judged_by("Forgetful"), 5),
    Case("fifth", "agent", "cut_replies", 114, "none", ("rollout.max_response_length_in_one_turn=9",), 5),
    Case("fifth", "agent", "entropy_collapse", 115, "none",
         ("trainer_common.algorithm.entropy_coef=-1.0", "trainer_common.optim.lr=2e-3")),
    Case("fifth", "agent", "kl_growth", 116, "none", (*DRIFT, "trainer_common.optim.lr=1e-2")),
    Case("fifth", "lake", "sampler_gap", 117, "engine is off by 0.02", ("model.dtype=float32",), 4),
    Case("fifth", "agent", "dead_tool", 118, "none", (f"rollout.agent.tools=[{FAULTS}->SlowCalculator]",), 4),
    Case("fifth", "agent", "gaming", 119, "none", judged_by("PaysForSpeed"), 12),
    Case("fifth", "countdown", "staleness", 120, "none", (*SMALL, *OLD), 12),
    Case("fifth", "countdown", "length_drift", 121, "pays for length",
         (*SMALL, "rollout.max_response_length_in_one_turn=32", "rollout.temperature=1.2",
          "trainer_common.optim.lr=2e-3"), 12),
    Case("fifth", "lake", "part_dominates", 122, "a character counts 20", JUDGE, 6),
    Case("fifth", "agent", "validation_gap", 123, "none",
         ("task_reader.jsonl_dataset_file.validation.file_path={scratch}/quotients.jsonl",)),
    Case("fifth", "agent", "always_solved", 124, "always 1.0", judged_by("Always"), 4),
    Case("fifth", "vowels", "repeated_replies", 125, "pays for repetition",
         ("rollout.max_response_length_in_one_turn=40",), 16),
    Case("sixth", "lake", "no_variance", 131, "constant", steps=4),
    Case("sixth", "agent", "never_solved", 132, "none",
         ("task_reader.jsonl_dataset_file.training.file_path={scratch}/wrong_answers.jsonl",), 5),
    Case("sixth", "countdown", "judge_errors", 133, "judge fails", (*SMALL, *JUDGE), 5),
    Case("sixth", "agent", "cut_replies", 134, "none", ("rollout.max_response_length_in_one_turn=11",), 5),
    Case("sixth", "lake", "entropy_collapse", 135, "none", (*COLLAPSE, "trainer_common.optim.lr=5e-3")),
    Case("sixth", "countdown", "kl_growth", 136, "none", (*SMALL, *DRIFT, "trainer_common.optim.lr=6e-3")),
    Case("sixth", "countdown", "sampler_gap", 137, "engine is off by 0.03", (*SMALL, "model.dtype=float32"), 4),
    Case("sixth", "agent", "dead_tool", 138, "none", (f"rollout.agent.tools=[{FAULTS}->BusyCalculator]",), 4),
    Case("sixth", "lake", "gaming", 139, "pays for staying on the ice"),
    Case("sixth", "agent", "staleness", 140, "none", OLD, 12),
    Case("sixth", "countdown", "length_drift", 141, "pays for length",
         (*SMALL, "rollout.max_response_length_in_one_turn=48", "rollout.temperature=1.4",
          "trainer_common.optim.lr=3e-3"), 12),
    Case("sixth", "countdown", "part_dominates", 142, "a character counts 40", (*SMALL, *JUDGE), 6),
    Case("sixth", "countdown", "validation_gap", 143, "none",
         (*SMALL, "task_reader.jsonl_dataset_file.validation.file_path={scratch}/four_numbers.jsonl"), 10),
    Case("sixth", "lake", "always_solved", 144, "everything is right", steps=5),
    Case("sixth", "vowels", "repeated_replies", 145, "pays for repetition",
         ("rollout.max_response_length_in_one_turn=20",), 20),
    Case("seventh", "capitals", "no_variance", 151, "constant", steps=4),
    Case("seventh", "maths", "never_solved", 152, "none",
         ("task_reader.jsonl_dataset_file.training.file_path={scratch}/three_factors.jsonl",), 5),
    Case("seventh", "capitals", "judge_errors", 153, "judge fails", judged_by("Overloaded"), 6),
    Case("seventh", "maths", "cut_replies", 154, "none", ("rollout.max_response_length_in_one_turn=7",), 5),
    Case("seventh", "capitals", "entropy_collapse", 155, "none", COLLAPSE, 12),
    Case("seventh", "capitals", "kl_growth", 156, "pays at random", (*DRIFT, "trainer_common.optim.lr=1e-2"), 12),
    Case("seventh", "maths", "sampler_gap", 157, "engine is off by 0.03", ("model.dtype=float32",), 5),
    Case("seventh", "agent", "dead_tool", 158, "none", (f"rollout.agent.tools=[{FAULTS}->UnpaidCalculator]",), 5),
    Case("seventh", "agent", "gaming", 159, "none", judged_by("PaysForForm")),
    Case("seventh", "maths", "staleness", 160, "none",
         ("trainer_common.algorithm.replay.groups=24", "trainer_common.algorithm.replay.max_age=6"), 12),
    Case("seventh", "countdown", "length_drift", 161, "pays for length",
         (*SMALL, "rollout.max_response_length_in_one_turn=36", "rollout.temperature=1.3",
          "trainer_common.optim.lr=2e-3"), 12),
    Case("seventh", "maths", "part_dominates", 162, "a character counts 50", JUDGE, 6),
    Case("seventh", "maths", "validation_gap", 163, "none",
         ("task_reader.jsonl_dataset_file.validation.file_path={scratch}/three_factors.jsonl",)),
    Case("seventh", "maths", "always_solved", 164, "everything is right", steps=5),
    Case("seventh", "capitals", "nothing_trained", 165, "none", ("trainer_common.optim.lr=0.0",), 5),
    Case("eighth", "lake", "no_variance", 171, "always 0.2", judged_by("Always"), 4),
    Case("eighth", "capitals", "never_solved", 172, "unsolvable", steps=5),
    Case("eighth", "vowels", "judge_errors", 173, "judge fails", judged_by("Overloaded"), 5),
    Case("eighth", "agent", "cut_replies", 174, "none", ("rollout.max_response_length_in_one_turn=8",), 5),
    Case("eighth", "vowels", "entropy_collapse", 175, "none", (*COLLAPSE, "trainer_common.optim.lr=5e-3"), 12),
    Case("eighth", "countdown", "kl_growth", 176, "pays at random",
         (*SMALL, *DRIFT, "trainer_common.optim.lr=1e-2")),
    Case("eighth", "capitals", "sampler_gap", 177, "engine is off by 0.05", ("model.dtype=float32",), 5),
    Case("eighth", "agent", "dead_tool", 178, "none", (f"rollout.agent.tools=[{FAULTS}->GatewayCalculator]",), 5),
    Case("eighth", "agent", "gaming", 179, "none", judged_by("PaysForTools"), 12),
    Case("eighth", "capitals", "staleness", 180, "none", OLD, 12),
    Case("eighth", "countdown", "length_drift", 181, "pays for length",
         (*SMALL, "rollout.max_response_length_in_one_turn=44", "rollout.temperature=1.3",
          "trainer_common.optim.lr=2.5e-3"), 12),
    Case("eighth", "capitals", "part_dominates", 182, "a character counts 5", JUDGE, 6),
    Case("eighth", "maths", "validation_gap", 183, "none",
         ("task_reader.jsonl_dataset_file.validation.file_path={scratch}/quotients.jsonl",)),
    Case("eighth", "capitals", "always_solved", 184, "everything is right", steps=5),
    Case("eighth", "capitals", "repeated_replies", 185, "pays for repetition",
         ("rollout.max_response_length_in_one_turn=24",), 20),
    Case("ninth", "countdown", "no_variance", 191, "always 0.3", (*SMALL, *judged_by("Always")), 4),
    Case("ninth", "maths", "never_solved", 192, "none",
         ("task_reader.jsonl_dataset_file.training.file_path={scratch}/wrong_answers.jsonl",), 5),
    Case("ninth", "lake", "judge_errors", 193, "judge fails", judged_by("Overloaded"), 6),
    Case("ninth", "maths", "cut_replies", 194, "none", ("rollout.max_response_length_in_one_turn=9",), 5),
    Case("ninth", "capitals", "entropy_collapse", 195, "none", (*COLLAPSE, "trainer_common.optim.lr=5e-3"), 12),
    Case("ninth", "vowels", "kl_growth", 196, "pays at random", (*DRIFT, "trainer_common.optim.lr=1e-2"), 12),
    Case("ninth", "vowels", "sampler_gap", 197, "engine is off by 0.03", ("model.dtype=float32",), 5),
    Case("ninth", "agent", "dead_tool", 198, "none", (f"rollout.agent.tools=[{FAULTS}->UnreachableCalculator]",), 4),
    Case("ninth", "lake", "gaming", 199, "pays for long walks", steps=12),
    Case("ninth", "maths", "staleness", 200, "none", OLD, 12),
    Case("ninth", "countdown", "length_drift", 201, "pays for length",
         (*SMALL, "rollout.max_response_length_in_one_turn=40", "rollout.temperature=1.3",
          "trainer_common.optim.lr=2e-3"), 14),
    Case("ninth", "countdown", "part_dominates", 202, "a character counts 30", (*SMALL, *JUDGE), 6),
    Case("ninth", "agent", "validation_gap", 203, "none",
         ("task_reader.jsonl_dataset_file.validation.file_path={scratch}/three_factors.jsonl",)),
    Case("ninth", "countdown", "always_solved", 204, "everything is right", SMALL, 5),
    Case("ninth", "capitals", "repeated_replies", 205, "pays for repetition",
         ("rollout.max_response_length_in_one_turn=32",), 20),
    Case("tenth", "agent", "no_variance", 211, "always 0.5", judged_by("Always"), 4),
    Case("tenth", "lake", "never_solved", 212, "unsolvable", steps=5),
    Case("tenth", "countdown", "judge_errors", 213, "judge fails", (*SMALL, *judged_by("Overloaded")), 6),
    Case("tenth", "agent", "cut_replies", 214, "none", ("rollout.max_response_length_in_one_turn=10",), 5),
    Case("tenth", "lake", "entropy_collapse", 215, "none", (*COLLAPSE, "trainer_common.optim.lr=4e-3")),
    Case("tenth", "lake", "kl_growth", 216, "pays at random", (*DRIFT, "trainer_common.optim.lr=6e-3")),
    Case("tenth", "countdown", "sampler_gap", 217, "engine is off by 0.04", (*SMALL, "model.dtype=float32"), 4),
    Case("tenth", "agent", "dead_tool", 218, "none", (f"rollout.agent.tools=[{FAULTS}->ShellCalculator]",), 4),
    Case("tenth", "countdown", "gaming", 219, "pays for any number"),
    Case("tenth", "countdown", "staleness", 220, "none", OLD, 12),
    Case("tenth", "countdown", "length_drift", 221, "pays for length",
         (*SMALL, "rollout.max_response_length_in_one_turn=36", "rollout.temperature=1.3",
          "trainer_common.optim.lr=2e-3"), 14),
    Case("tenth", "lake", "part_dominates", 222, "a character counts 15", JUDGE, 6),
    Case("tenth", "countdown", "validation_gap", 223, "none",
         (*SMALL, "task_reader.jsonl_dataset_file.validation.file_path={scratch}/four_numbers.jsonl"), 10),
    Case("tenth", "agent", "always_solved", 224, "always 1.0", judged_by("Always"), 4),
    Case("tenth", "vowels", "repeated_replies", 225, "pays for repetition",
         ("rollout.max_response_length_in_one_turn=30",), 20),
    *(Case("healthy", "maths", "", seed) for seed in (31, 32)),
    *(Case("healthy", "agent", "", seed) for seed in (33, 34)),
    *(Case("healthy", "countdown", "", seed) for seed in (35, 36)),
    *(Case("healthy", "lake", "", seed, steps=14) for seed in (37, 38)),
    *(Case("healthy", "vowels", "", seed) for seed in (39, 40)),
)  # fmt: skip


PARTS = tuple(dict.fromkeys(case.part for case in CASES))


def write_tasks(scratch: Path) -> None:
    """Countdown with four numbers instead of two, or without a solution; other maths; the questions of the vowels."""
    rng = random.Random(5)
    lines = []
    for number in range(32):
        given = [rng.randrange(2, 12) for _ in range(4)]
        lines.append({"id": f"four-{number}", "question": "Make the target.", "numbers": given, "target": sum(given)})
    _write(scratch / "four_numbers.jsonl", lines)
    lines = []
    for number in range(32):
        one, two, three = (rng.randrange(11, 100) for _ in range(3))
        question = f"What is {one}*{two}*{three}?"
        lines.append({"id": f"factors-{number}", "question": question, "answer": str(one * two * three)})
    _write(scratch / "three_factors.jsonl", lines)
    lines = []
    for number in range(64):
        one, two = rng.randrange(2, 12), rng.randrange(2, 12)
        line = {"id": f"impossible-{number}", "question": "Make the target.", "numbers": [one, two], "target": 997}
        lines.append(line)
    _write(scratch / "impossible.jsonl", lines)
    lines = []
    for number in range(32):
        one, two = rng.randrange(2, 100), rng.randrange(2, 10)
        lines.append({"id": f"quotient-{number}", "question": f"What is {one * two}/{two}?", "answer": str(one)})
    _write(scratch / "quotients.jsonl", lines)
    lines = [json.loads(line) for line in OTHER_TASKS.read_text().splitlines()]
    _write(scratch / "wrong_answers.jsonl", [{**line, "answer": str(int(line["answer"]) + 1)} for line in lines])
    words = ["tell", "sing", "write", "name", "find", "call", "give", "show", "read", "ask", "try", "draw"]
    asked = [{"id": f"{word}-{thing}", "question": f"{word} {thing}"} for word in words for thing in ("one", "two")]
    _write(scratch / "training.jsonl", asked[:16])
    _write(scratch / "held_out.jsonl", asked[16:])


def _write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def overrides_of(case: Case, scratch: Path) -> list[str]:
    """The overrides of its YAML."""
    _, workflow, steps = CONFS[case.task]
    steps = case.steps or steps
    found = [f"{part}.seed={case.seed}" for part in ("rollout", "trainer_common", "task_reader")]
    found += [f"user.fault={case.injected}", f"experiment_name={case.name}", "trainer_common.save_freq=0"]
    found += [f"trainer_common.total_training_steps={steps}", f"trainer_common.test_freq={steps}"]
    if workflow:
        found.append(f"rollout.user_workflow={FAULTS}->{workflow}")
    training, validation = (f"task_reader.jsonl_dataset_file.{part}.file_path" for part in ("training", "validation"))
    if case.task == "agent":  # other questions than those that the rules were made on
        found.append(f"{training}={OTHER_TASKS}")
    if case.task == "countdown":
        found.append(f"model.path={scratch}/countdown_cold_start/hf")
    if case.task in ("vowels", "capitals"):
        found += [f"{training}={scratch}/training.jsonl", f"{validation}={scratch}/held_out.jsonl"]
    return found + [one.format(scratch=scratch) for one in case.overrides]


def ajet(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ajet", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)


def cold_start(scratch: Path) -> None:
    """The player of the countdown."""
    if not (scratch / "countdown_cold_start/hf").exists():
        done = ajet("--conf", COLD_START, "--exp-dir", scratch, "--quiet")
        assert done.returncode == 0, done.stderr


def conduct(case: Case, scratch: Path) -> dict[str, Any]:
    """One run, and what is said of it."""
    if case.task == "countdown":
        cold_start(scratch)
    folder = scratch / case.name
    if not (folder / "done").exists():
        done = ajet(
            "--conf", CONFS[case.task][0], "--exp-dir", scratch, "--fresh", "--quiet", *overrides_of(case, scratch)
        )
        if not (folder / "metrics.jsonl").exists():
            raise RuntimeError(f"{case.name}: {done.stderr[-3000:]}")
        (folder / "done").write_text(f"exit code {done.returncode}\n{done.stderr}")
    times = [json.loads(line)["time"] for line in (folder / "events.jsonl").read_text().splitlines()]
    seconds = max(times) - min(times)
    said = ajet("diagnose", folder, "--json")
    assert said.returncode in (0, 1), said.stderr
    findings = [json.loads(line) for line in said.stdout.splitlines()]
    faults = [one for one in findings if one["level"] in ("bad", "warn")]
    named = list(dict.fromkeys(one["fault"] for one in faults))
    right = (named[:1] == [case.fault]) if case.fault else not named
    print(f"{'  ' if right else '✗ '}{case.name:44} {', '.join(named) or '–'}  {seconds:.0f} s", flush=True)
    first = {"text": faults[0]["text"], "change": faults[0]["change"]} if faults else {}
    return {"task": case.task, "injected": case.injected, "seed": case.seed, "expected": case.fault, "named": named,
            "right": right, **first, "seconds": round(seconds, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts or names of runs")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    arguments = parser.parse_args()
    chosen = [one for one in CASES if not arguments.only or {one.part, one.name, one.task} & {*arguments.only}]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (arguments.keep or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        write_tasks(scratch)
        runs = {case.name: conduct(case, scratch) for case in chosen}
    known = known_figures("diagnosis")
    if arguments.only:
        runs = known.get("runs", {}) | runs
    names = [case.name for case in CASES]
    runs = {name: runs[name] for name in names if name in runs}
    right = {part: [run["right"] for name, run in runs.items() if name.startswith(part)] for part in PARTS}
    totals = {part: f"{sum(given)} of {len(given)}" for part, given in right.items()}
    print(totals)
    write_result("diagnosis", {"right": totals, "at_first": known.get("at_first", {}), "runs": runs})


if __name__ == "__main__":
    main()
