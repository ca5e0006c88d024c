"""`Trial`: a candidate tried on one task. `Score`: its trials on several tasks. `Budget`: what all of it may cost.

A trial that failed because of the engine or the infrastructure says nothing about the candidate: it has no value, and
its task is left out when candidates are compared. Any other trial without a reward counts as 0.

The budget is checked before each batch and each question to the proposer. A batch in progress still finishes when a
limit is reached, so tokens, money and seconds can be exceeded by one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ajet.schema.chat import Message
from ajet.schema.errors import AjetError


class Purpose(StrEnum):
    SEARCH = "search"
    """Their transcripts and feedback are read, to write proposals."""
    BATCH = "batch"
    """A few validation tasks, on which several candidates are compared."""
    VALIDATION = "validation"
    """All validation tasks: decides which candidate is the best."""
    CONFIRMATION = "confirmation"
    """Tasks that no candidate has seen, once the search is over."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate tried on one task, once or several times."""

    task_id: str
    reward: float | None = None
    """The mean of its episodes' rewards; None if none has one."""
    success: float | None = None
    """The share of its episodes that succeeded."""
    failure: str = ""
    """Why an episode failed, in one line."""
    fault: bool = False
    """All of its episodes failed, and neither the candidate nor the model is the cause."""
    feedback: str = ""
    """Messages of the judge, the workflow and failures."""
    query: str = ""
    conversations: tuple[list[Message], ...] = ()
    """The messages of the model calls, one list for each conversation: of a `search` trial, which is read."""
    episodes: tuple[str, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    """Prompt and sampled tokens of all its model calls."""
    prompts_used: frozenset[str] | None = None
    """The templates that its workflow asked for; None if that isn't known."""

    @property
    def value(self) -> float | None:
        """The value in a mean; None if the trial doesn't count."""
        if self.fault:
            return None
        return 0.0 if self.reward is None else self.reward

    def to_record(self) -> dict[str, Any]:
        """The record for the history, without transcripts, which are in the episodes."""
        record: dict[str, Any] = {"task": self.task_id, "reward": self.reward, "success": self.success}
        if self.failure:
            record["failure"] = self.failure
        if self.fault:
            record["fault"] = True
        return {**record, "episodes": list(self.episodes)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Trial:
        return cls(
            task_id=str(record["task"]),
            reward=record["reward"],
            success=record["success"],
            failure=str(record.get("failure", "")),
            fault=bool(record.get("fault", False)),
            episodes=tuple(record["episodes"]),
        )


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate's trials, in the order of the tasks."""

    candidate: str
    purpose: Purpose
    trials: tuple[Trial, ...] = field(default_factory=tuple)

    @property
    def values(self) -> dict[str, float]:
        """The values by task, without those that don't count."""
        return {trial.task_id: trial.value for trial in self.trials if trial.value is not None}

    @property
    def mean(self) -> float | None:
        """Over the trials that count; None if there is none."""
        return _mean(self.values.values())

    @property
    def success(self) -> float | None:
        """The share of its trials' episodes that succeeded."""
        return _mean(0.0 if trial.success is None else trial.success for trial in self.trials if not trial.fault)


def common_means(scores: Sequence[Score]) -> list[float | None]:
    """Each score's mean over the tasks that count in all of them. A candidate of which no trial counts gets None, and
    doesn't narrow the tasks of the others."""
    counted = [score.values for score in scores]
    tasks = set.intersection(*(set(values) for values in counted if values)) if any(counted) else set()
    return [_mean(values[task] for task in sorted(tasks)) if values and tasks else None for values in counted]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


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
        self._spent.seconds = self._clock() - self._began
        return self._spent

    def add_episodes(self, count: int, prompt_tokens: int, sampled_tokens: int) -> None:
        self._spent.episodes += count
        self._spent.prompt_tokens += prompt_tokens
        self._spent.sampled_tokens += sampled_tokens
        self._spent.money += _cost(self._prices, prompt_tokens, sampled_tokens)

    def add_question(self, prompt_tokens: int, sampled_tokens: int) -> None:
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
