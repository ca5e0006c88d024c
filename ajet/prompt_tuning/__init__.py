"""Optimisers of prompt templates. Pure search: given "score these candidates on those tasks" and a proposer."""

from __future__ import annotations

from ajet.prompt_tuning.budget import Budget, BudgetExhausted, Limits, Spent
from ajet.prompt_tuning.proposal import (
    Candidate,
    Checks,
    Kind,
    Proposer,
    ProposerError,
    Reply,
    Request,
    SearchFailedError,
    UnusedTemplateError,
)
from ajet.prompt_tuning.search import Algorithm, Earlier, Journal, Search, Sizes
from ajet.prompt_tuning.trial import Purpose, Score, Trial

__all__ = [
    "Algorithm",
    "Budget",
    "BudgetExhausted",
    "Candidate",
    "Checks",
    "Earlier",
    "Journal",
    "Kind",
    "Limits",
    "Proposer",
    "ProposerError",
    "Purpose",
    "Reply",
    "Request",
    "Score",
    "Search",
    "SearchFailedError",
    "Sizes",
    "Spent",
    "Trial",
    "UnusedTemplateError",
]
