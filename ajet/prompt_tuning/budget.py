"""`Budget`: limits what a search may spend. It is checked before each batch and each question to the proposer. A batch
in progress still finishes when a limit is reached, so tokens, money and seconds can be exceeded by one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ajet.schema.errors import AjetError


class BudgetExhausted(AjetError):
    """The budget allows no further batch or question. The search ends; the best so far stands."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    episodes: int | None = None
    tokens: int | None = None
    money: float | None = None
    seconds: float | None = None
    reserved: int = 0
    """How many of `episodes` are reserved for the confirmation."""


@dataclass(slots=True)
class Spent:
    """The expenses, by kind."""

    episodes: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    questions: int = 0
    """Questions to the proposer."""
    proposer_prompt_tokens: int = 0
    proposer_sampled_tokens: int = 0
    money: float = 0.0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the episodes and the proposer together."""
        return self.prompt_tokens + self.sampled_tokens + self.proposer_prompt_tokens + self.proposer_sampled_tokens

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.tokens}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Spent:
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})


class Budget:
    """The limits, and what was spent so far."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        prices: tuple[float, float] = (0.0, 0.0),
        proposer_prices: tuple[float, float] = (0.0, 0.0),
        spent: Spent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prices are per million prompt and sampled tokens, for the episodes' model and the proposer's."""
        self.limits = limits or Limits()
        self._prices, self._proposer_prices = prices, proposer_prices
        self._spent = spent or Spent()
        self._clock = clock
        self._began = clock() - self._spent.seconds
        self._confirming = False

    @property
    def spent(self) -> Spent:
        """What was spent until now."""
        self._spent.seconds = self._clock() - self._began
        return self._spent

    def add_episodes(self, count: int, prompt_tokens: int, sampled_tokens: int) -> None:
        """Record episodes that have ended."""
        self._spent.episodes += count
        self._spent.prompt_tokens += prompt_tokens
        self._spent.sampled_tokens += sampled_tokens
        self._spent.money += _cost(self._prices, prompt_tokens, sampled_tokens)

    def add_question(self, prompt_tokens: int, sampled_tokens: int) -> None:
        """Record a question that the proposer has answered."""
        self._spent.questions += 1
        self._spent.proposer_prompt_tokens += prompt_tokens
        self._spent.proposer_sampled_tokens += sampled_tokens
        self._spent.money += _cost(self._proposer_prices, prompt_tokens, sampled_tokens)

    def confirm(self) -> None:
        """From now on, the reserved episodes may be run, and no other limit applies to them."""
        self._confirming = True

    def check(self, episodes: int = 0) -> None:
        """Raise `BudgetExhausted` unless so many episodes, or one question, may begin."""
        if self._confirming:
            return
        limits, spent = self.limits, self.spent
        if limits.episodes is not None and episodes:
            free = limits.episodes - limits.reserved - spent.episodes
            if episodes > free:
                kept = f" ({limits.reserved} are kept for the confirmation)" if limits.reserved else ""
                raise BudgetExhausted(
                    f"budget.episodes: {spent.episodes} of {limits.episodes} were run{kept}, and the next batch needs "
                    f"{episodes}"
                )
        for name in ("tokens", "money", "seconds"):
            limit, used = getattr(limits, name), getattr(spent, name)
            if limit is not None and used >= limit:
                raise BudgetExhausted(f"budget.{name}: {used:,.6g} of {limit:,.6g} is spent")

    @property
    def left(self) -> dict[str, float]:
        """What is left of each limit that is set, without the reserve."""
        spent, left = self.spent, {}
        for name in ("episodes", "tokens", "money", "seconds"):
            limit = getattr(self.limits, name)
            if limit is not None:
                kept = self.limits.reserved if name == "episodes" else 0
                left[name] = max(0.0, float(limit - kept - getattr(spent, name)))
        return left


def _cost(prices: tuple[float, float], prompt_tokens: int, sampled_tokens: int) -> float:
    return (prices[0] * prompt_tokens + prices[1] * sampled_tokens) / 1e6
