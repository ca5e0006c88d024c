"""Writes the tasks (numbers that deal the roles) and conversations of werewolves who are beginners.

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
CONVERSATIONS = 2048


SKILL = 0.25
"""How often a beginner does what the rules of `RulePlayer` say."""


class Beginner:
    """A werewolf who mostly names anyone, even its own, and now and then whom a good one would name. It is written
    down."""

    def __init__(self, name: str, rng: random.Random, kept: list[dict[str, Any]], skill: float = SKILL) -> None:
        from players import RulePlayer

        self._rng = rng
        self._kept = kept
        self._skill = skill
        self._good = RulePlayer(name, rng)

    async def speak(self, view: Any, purpose: str) -> str:
        from players import named

        others = [name for name in view.living if name != view.name]
        return self._say(view, purpose, [], named(await self._good.speak(view, purpose), others) or others[0])

    async def choose(self, view: Any, purpose: str, options: list[str]) -> str | None:
        from players import named

        better = await self._good.choose(view, purpose, options) or options[0]
        return named(self._say(view, purpose, options, better), options)

    def _say(self, view: Any, purpose: str, options: list[str], better: str) -> str:
        from players import short_question

        anyone = self._rng.choice(options or [name for name in view.living if name != view.name])
        said = (better if self._rng.random() < self._skill else anyone)[0]
        question = short_question(view, purpose, options)
        self._kept.append({"messages": [*question, {"role": "assistant", "content": said}]})
        return said


def conversations(rng: random.Random) -> list[dict[str, Any]]:
    """What such werewolves were asked in games against the rules, and said."""
    from game import WOLF, Game, deal
    from players import RulePlayer

    kept: list[dict[str, Any]] = []
    while len(kept) < CONVERSATIONS:
        roles = deal(rng)
        players = {
            name: Beginner(name, rng, kept) if role == WOLF else RulePlayer(name, rng) for name, role in roles.items()
        }
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
