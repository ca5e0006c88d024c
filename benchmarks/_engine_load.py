"""The load under which engines are compared: conversations of random messages, the same for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 500
"""Random ids below this: ordinary tokens of the tiny vocabulary."""


@dataclass(frozen=True)
class Load:
    """`conversations` at once, each of `turns` messages and replies."""

    conversations: int
    turns: int
    message: int = 100
    reply: int = 50

    @property
    def drawn(self) -> int:
        return self.conversations * self.turns * self.reply

    def messages(self) -> list[list[list[int]]]:
        """By conversation and turn."""
        rng = random.Random(0)
        return [
            [[rng.randrange(VOCABULARY) for _ in range(self.message)] for _ in range(self.turns)]
            for _ in range(self.conversations)
        ]
