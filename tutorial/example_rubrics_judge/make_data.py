"""Writes the data of this example: sums to train and validate on, and answers graded by what a reader would want."""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent / "data"


def main() -> None:
    draw = random.Random(0)
    sums = [(draw.randint(2, 49), draw.randint(2, 49)) for _ in range(80)]
    tasks = [
        {"id": f"sum-{n}", "question": f"What is {a} + {b}?", "answer": str(a + b)} for n, (a, b) in enumerate(sums)
    ]
    _write("train.jsonl", tasks[:64])
    _write("validation.jsonl", tasks[64:72])
    graded = []
    for (a, b), task in zip(sums[72:], tasks[72:], strict=True):
        right, wrong = a + b, a + b + draw.randint(1, 9)
        answers = [
            (f"{a} + {b} = {right}", 1.0),
            (str(right), 0.8),
            (f"{a} + {b} = {wrong}", 0.1),
            ("Good question!", 0.0),
        ]
        graded += [{"main_query": task["question"], "answer": text, "score": score} for text, score in answers]
    _write("graded.jsonl", graded)


def _write(name: str, rows: list[dict[str, object]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
