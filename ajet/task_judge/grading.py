"""`Grader`: a helper model that scores an answer, or ranks several. In: texts. Out: `Grade`s.

An answer of the model that isn't a score within the scale, or a full ranking, is asked for again and at last an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajet.schema.chat import Message
from ajet.task_judge.helper import Asker, WrongAnswer, read_json
from ajet.task_judge.prompts import Template


@dataclass(frozen=True, slots=True)
class Scale:
    """The scores that a grader may give."""

    low: float
    high: float
    normalise: bool = False
    """Rewards are scores scaled to 0 … 1."""

    def reward(self, score: float) -> float:
        return (score - self.low) / (self.high - self.low) if self.normalise else score

    def at(self, share: float) -> float:
        """The score this far up the scale: 0 is the lowest, 1 the highest."""
        return self.low + share * (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader thinks of one answer."""

    score: float
    votes: list[float]
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class Grader:
    """Asks a model. `pointwise` knows `{answer}`, `listwise` knows `{answers}`; both know what the values name."""

    asker: Asker
    pointwise: Template
    listwise: Template
    scale: Scale
    votes: int = 1
    combine: str = "mean"
    swap_order: bool = True
    system_prompt: str | None = None
    temperature: float = 0.0
    max_tokens: int = 1024

    async def score(self, values: Mapping[str, str]) -> Grade:
        """Grade one answer."""
        low, high = self.scale.low, self.scale.high
        schema = _object("score", {"type": "number", "minimum": low, "maximum": high})
        question = self.pointwise.fill(values)
        asked = [self._ask(question, schema, vote) for vote in range(self.votes)]
        said = await asyncio.gather(*asked)
        scores = [float(each["score"]) for each in said]
        return Grade(self._together(scores), scores, [str(each.get("reason", "")) for each in said])

    async def rank(self, values: Sequence[Mapping[str, str]]) -> list[Grade]:
        """Rank answers to one query. Equal answers get one place; a single answer is graded by itself."""
        different = list(dict.fromkeys(each["answer"] for each in values))
        if len(different) == 1:
            grade = await self.score(values[0])
            return [grade] * len(values)
        asked = [
            self._place(different, order, values[0], vote)
            for vote in range(self.votes)
            for order in self._orders(len(different), different, vote)
        ]
        said = await asyncio.gather(*asked)
        best = len(different) - 1
        grades = {}
        for index, answer in enumerate(different):
            scores = [self.scale.at(1 - places[index] / best) for places, _ in said]
            grades[answer] = Grade(self._together(scores), scores, [reason for _, reason in said])
        return [grades[each["answer"]] for each in values]

    def _orders(self, count: int, answers: Sequence[str], vote: int) -> list[list[int]]:
        """The orders in which the answers are shown: by chance, and the other way round."""
        seed = hashlib.sha256("\0".join([*sorted(answers), str(vote)]).encode(errors="replace")).digest()
        order = list(range(count))
        random.Random(seed).shuffle(order)
        return [order, order[::-1]] if self.swap_order else [order]

    async def _place(
        self, answers: Sequence[str], order: Sequence[int], values: Mapping[str, str], vote: int
    ) -> tuple[dict[int, int], str]:
        """The place of each answer (0: the best), and the reason."""
        shown = "\n".join(
            f'<answer number="{number}">\n{answers[index]}\n</answer>' for number, index in enumerate(order, start=1)
        )
        count = len(order)
        number = {"type": "integer", "minimum": 1, "maximum": count}
        ranking = {"type": "array", "items": number, "minItems": count, "maxItems": count, "uniqueItems": True}
        said = await self._ask(self.listwise.fill({**values, "answers": shown}), _object("ranking", ranking), vote)
        places = {order[number - 1]: place for place, number in enumerate(said["ranking"])}
        return places, str(said.get("reason", ""))

    async def _ask(self, question: str, schema: dict[str, Any], vote: int) -> Any:
        messages: list[Message] = [{"role": "user", "content": question}]
        if self.system_prompt:
            messages.insert(0, {"role": "system", "content": self.system_prompt})

        def read(text: str) -> Any:
            value = read_json(text, schema)
            for key in ("score", "ranking"):
                if isinstance(value.get(key), bool):
                    raise WrongAnswer(f"{key} should be a number")
            return value

        return await self.asker.ask(messages, read, draw=vote, temperature=self.temperature, max_tokens=self.max_tokens)

    def _together(self, scores: list[float]) -> float:
        return statistics.median(scores) if self.combine == "median" else statistics.fmean(scores)


def _object(key: str, kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: kind, "reason": {"type": "string"}}, "required": [key]}
