"""A teacher in this process: another model's log-probabilities of the tokens that the student sampled.

It reads plain rows, since it may be of another family than the student, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ajet.credit.weights import EpisodeCredit
from ajet.schema.call_tree import CallTree
from ajet.trainer.forward import RowForward
from ajet.trainer.pack import items_of
from ajet.trainer.planner import CostModel, plan, rows_for

Logprobs = dict[tuple[int, int], NDArray[np.float64]]
"""Logprobs of calls' trained tokens, by (episode of the batch, call)."""


class ModelTeacher:
    """A Hugging Face causal model."""

    def __init__(self, model: Any, budget: int) -> None:
        self._model = model
        self._costs = CostModel.of(model)
        self._budget = budget
        """Tokens per forward pass."""

    def logprobs(self, batch: Sequence[tuple[CallTree, EpisodeCredit]]) -> Logprobs:
        """Of all trained tokens, each at the temperature of its call."""
        items = items_of(batch)
        forward = RowForward(self._budget)
        known: Logprobs = {}
        with torch.no_grad():
            for pack in plan(items, self._costs, self._budget, [rows_for(self._model)]) if items else []:
                values = forward(self._model, pack).logprob_E.double().cpu().numpy()
                known.update((key, values[where]) for key, where in pack.edges.by_call())
        return known
