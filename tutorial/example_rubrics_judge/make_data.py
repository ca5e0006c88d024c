"""Writes the data of this example: customers' questions to train and validate on, answers graded by what a shop would
want, and conversations of a small model with several habits.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent / "data"
CONVERSATIONS = 1200
ON_ITS_WAY, SORRY = "Order {} is on its way.", "Sorry for the wait!"


def main() -> None:
    draw = random.Random(0)
    orders = list(range(10, 100))
    draw.shuffle(orders)
    tasks = [{"id": f"order-{order}", "question": f"Where is order {order}?"} for order in orders]
    _write("train.jsonl", tasks[:64])
    _write("validation.jsonl", tasks[64:82])
    graded = []
    for order, task in zip(orders[82:], tasks[82:], strict=True):
        named = ON_ITS_WAY.format(order)
        answers = [(f"{named} {SORRY}", 1.0), (named, 0.6), (SORRY, 0.4), ("Good question!", 0.0)]
        graded += [{"main_query": task["question"], "answer": text, "score": score} for text, score in answers]
    _write("graded.jsonl", graded)
    _write("conversations.jsonl", [_conversation(draw, draw.choice(orders)) for _ in range(CONVERSATIONS)])


def _conversation(draw: random.Random, order: int) -> dict[str, object]:
    """One answer in six is as the graded examples want it."""
    named, other = ON_ITS_WAY.format(order), ON_ITS_WAY.format(draw.randint(10, 99))
    said = draw.choice([f"{named} {SORRY}", named, f"{other} {SORRY}", other, SORRY, "Good question!"])
    return {
        "messages": [{"role": "user", "content": f"Where is order {order}?"}, {"role": "assistant", "content": said}]
    }


def _write(name: str, rows: list[dict[str, object]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
