"""The helper model: one that helps readers, judges and prompt proposers, and isn't tuned. It has a budget."""

from __future__ import annotations

from ajet.task_judge.helper.answers import AnswerCache
from ajet.task_judge.helper.asker import Asker, UnusableAnswerError, WrongAnswer, json_values, read_json
from ajet.task_judge.helper.model import (
    DASHSCOPE_URL,
    OPENAI_URL,
    Budget,
    Endpoint,
    HelperBudgetError,
    HelperError,
    HelperModel,
)
from ajet.task_judge.helper.near_duplicates import NearDuplicates

__all__ = [
    "DASHSCOPE_URL",
    "OPENAI_URL",
    "AnswerCache",
    "Asker",
    "Budget",
    "Endpoint",
    "HelperBudgetError",
    "HelperError",
    "HelperModel",
    "NearDuplicates",
    "UnusableAnswerError",
    "WrongAnswer",
    "json_values",
    "read_json",
]
