"""Generates the tasks, and conversations of a player who knows the rules but tries at random.

python tutorial/example_countdown/make_data.py [--numbers 3]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

SIZES = {"validation": 64, "train": 512}
CONVERSATIONS = 768
LARGEST = 12


def game(rng: random.Random, count: int) -> dict[str, Any]:
    """Some numbers and a target that they can make."""
    from countdown import makes

    numbers = [rng.randint(2, LARGEST) for _ in range(count)]
    return {"numbers": numbers, "target": makes(attempt(rng, numbers), numbers)}


def attempt(rng: random.Random, numbers: list[int]) -> str:
    """A random expression of the numbers."""
    text, *others = map(str, rng.sample(numbers, len(numbers)))
    for number in others:
        text += rng.choice("+-*") + number
    return text


def conversation(rng: random.Random, count: int) -> dict[str, Any]:
    """A conversation of a player who follows the rules but guesses."""
    from countdown import TRIES, makes, question, verdict

    asked = game(rng, count)
    numbers, target = asked["numbers"], asked["target"]
    messages = [{"role": "user", "content": question(numbers, target)}]
    for tries in range(1, TRIES + 1):
        said = attempt(rng, numbers)
        messages.append({"role": "assistant", "content": said})
        if makes(said, numbers) == target or tries == TRIES:
            break
        messages.append({"role": "user", "content": verdict(said, numbers)})
    return {"messages": messages}


def write(folder: Path, count: int, seed: int) -> None:
    """Write all three files. No validation game appears in the others."""
    rng = random.Random(seed)
    folder.mkdir(exist_ok=True)
    held_out: set[str] = set()
    for split, size in SIZES.items():
        lines: list[str] = []
        while len(lines) < size:
            asked = game(rng, count)
            key = json.dumps(asked)
            if key in held_out:
                continue
            if split == "validation":
                held_out.add(key)
            lines.append(json.dumps({"id": f"{split}-{len(lines):03}", "question": "Make the target.", **asked}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    talks = (json.dumps(conversation(rng, count)) for _ in range(CONVERSATIONS))
    (folder / "conversations.jsonl").write_text("\n".join(talks) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--numbers", type=int, default=2, help="how many to combine; more are harder")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", type=Path, default=FOLDER / "data")
    arguments = parser.parse_args()
    write(arguments.out, arguments.numbers, arguments.seed)
