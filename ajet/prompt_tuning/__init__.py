"""Optimisers of prompt templates. Pure search: given "score these candidates on those tasks" and a proposer.

Here is what an algorithm or a proposer of your own needs.
"""

from __future__ import annotations

from ajet.prompt_tuning.proposal import Candidate, Kind, Proposer, ProposerError, Reply, Request
from ajet.prompt_tuning.search import Algorithm, Search, Sizes
from ajet.prompt_tuning.trial import BudgetExhausted, Purpose, Score, Trial

__all__ = [
    "Algorithm",
    "BudgetExhausted",
    "Candidate",
    "Kind",
    "Proposer",
    "ProposerError",
    "Purpose",
    "Reply",
    "Request",
    "Score",
    "Search",
    "Sizes",
    "Trial",
]
