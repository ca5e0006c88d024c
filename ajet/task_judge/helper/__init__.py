"""The helper model, which serves readers, judges and prompt proposers within a budget, and isn't trained."""

from __future__ import annotations

from ajet.task_judge.helper.answers import AnswerCache, NearDuplicates, WrongAnswer, json_values, read_json
from ajet.task_judge.helper.model import (
    DASHSCOPE_URL,
    OPENAI_URL,
    Asker,
    HelperBudget,
    HelperBudgetError,
    HelperEndpoint,
    HelperError,
    HelperModel,
    HelperRefusalError,
    UnusableAnswerError,
)

__all__ = [
    "DASHSCOPE_URL",
    "OPENAI_URL",
    "AnswerCache",
    "Asker",
    "HelperBudget",
    "HelperBudgetError",
    "HelperEndpoint",
    "HelperError",
    "HelperModel",
    "HelperRefusalError",
    "NearDuplicates",
    "UnusableAnswerError",
    "WrongAnswer",
    "json_values",
    "read_json",
]
