"""Generates the tasks: two-step word problems with whole-number answers. The same seed gives the same files.

python tutorial/example_math_agent/make_data.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).parent / "data"
SIZES = {"train": 400, "validation": 64}
SEED = 20


def bottles(rng: random.Random) -> tuple[str, int]:
    rows, each, broken = rng.randint(6, 40), rng.randint(6, 30), rng.randint(2, 30)
    return (
        f"A crate holds {rows} rows of {each} bottles. {broken} bottles break on the way. How many bottles are left?",
        rows * each - broken,
    )


def tickets(rng: random.Random) -> tuple[str, int]:
    adults, children, price = rng.randint(12, 90), rng.randint(12, 90), rng.randint(2, 9) * 2
    return (
        f"A museum sells {adults} adult tickets at {price} coins and {children} child tickets at half that price. "
        "How many coins does it take in?",
        adults * price + children * price // 2,
    )


def pages(rng: random.Random) -> tuple[str, int]:
    days, per_day = rng.randint(4, 30), rng.randint(11, 60)
    total = days * per_day + rng.randint(20, 300)
    return (
        f"A book has {total} pages. After reading {per_day} pages a day for {days} days, how many pages remain?",
        total - days * per_day,
    )


def tank(rng: random.Random) -> tuple[str, int]:
    inflow, outflow, minutes, start = rng.randint(20, 60), rng.randint(3, 19), rng.randint(5, 45), rng.randint(50, 500)
    return (
        f"A tank holds {start} litres. A pump adds {inflow} litres a minute while {outflow} litres a minute leak out. "
        f"How many litres does it hold after {minutes} minutes?",
        start + (inflow - outflow) * minutes,
    )


def shelves(rng: random.Random) -> tuple[str, int]:
    shelves, each = rng.randint(5, 30), rng.randint(8, 40)
    return (
        f"{shelves * each} books are spread evenly over {shelves} shelves, and 3 more are put on each shelf. "
        "How many books stand on one shelf?",
        each + 3,
    )


KINDS: list[Callable[[random.Random], tuple[str, int]]] = [bottles, tickets, pages, tank, shelves]


def main() -> None:
    rng = random.Random(SEED)
    seen: set[str] = set()
    DATA.mkdir(exist_ok=True)
    for split, size in SIZES.items():
        lines = []
        while len(lines) < size:
            kind = rng.choice(KINDS)
            question, answer = kind(rng)
            if question in seen:
                continue
            seen.add(question)
            row = {"id": f"{split}-{len(lines):03}", "question": question, "answer": str(answer), "tag": kind.__name__}
            lines.append(json.dumps(row))
        (DATA / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
