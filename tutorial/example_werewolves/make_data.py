"""Writes the tasks (numbers that deal the roles) and conversations of werewolves who know only how to name somebody.

python tutorial/example_werewolves/make_data.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

SIZES = {"train": 256, "validation": 32}
FIRST = {"train": 0, "validation": 1_000_000}
CONVERSATIONS = 1024


class Guesser:
    """A werewolf who names anyone, even its own, and is written down."""

    def __init__(self, rng: random.Random, kept: list[dict[str, Any]]) -> None:
        self._rng = rng
        self._kept = kept

    async def speak(self, view: Any, purpose: str) -> str:
        return self._say(view, purpose, [])

    async def choose(self, view: Any, purpose: str, options: list[str]) -> str | None:
        from players import named

        return named(self._say(view, purpose, options), options)

    def _say(self, view: Any, purpose: str, options: list[str]) -> str:
        from players import short_question

        said = self._rng.choice(options or [name for name in view.living if name != view.name])[0]
        question = short_question(view, purpose, options)
        self._kept.append({"messages": [*question, {"role": "assistant", "content": said}]})
        return said


def conversations(rng: random.Random) -> list[dict[str, Any]]:
    """What guessing werewolves were asked in games against the rules, and said."""
    from game import WOLF, Game, deal
    from players import RulePlayer

    kept: list[dict[str, Any]] = []
    while len(kept) < CONVERSATIONS:
        roles = deal(rng)
        players = {n: Guesser(rng, kept) if role == WOLF else RulePlayer(n, rng) for n, role in roles.items()}
        asyncio.run(Game(roles, players, rng).play())
    return kept[:CONVERSATIONS]


def write(folder: Path, seed: int) -> None:
    folder.mkdir(exist_ok=True)
    for split, size in SIZES.items():
        tasks = (
            {"id": f"{split}-{n:03}", "question": "Play werewolves.", "random_number": FIRST[split] + n}
            for n in range(size)
        )
        _write(folder / f"{split}.jsonl", tasks)
    _write(folder / "conversations.jsonl", conversations(random.Random(seed)))


def _write(file: Path, rows: Any) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER / "data")
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed)
