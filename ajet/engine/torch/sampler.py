"""From logits to drawn tokens: one per row, with each request's own parameters and random numbers.

The logprob of a token is log_softmax(logits / T) over the full vocabulary, before penalties and truncation (T = 0
counts as T = 1). Drawing applies penalties, then temperature, then top_k, top_p and min_p. A draw depends only on its
row, on its parameters and on its next random number.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ajet.schema.generation import Sampling


class Draw(NamedTuple):
    """One drawn token; `logprob` is NaN if the model's logits are."""

    token: int
    logprob: float
    top: list[tuple[int, float]] | None


@dataclass(slots=True)
class DrawState:
    """One request's parameters, its random numbers, and what it has drawn."""

    sampling: Sampling
    prompt: list[int]
    top_logprobs: int
    stream: random.Random
    drawn: list[int] = field(default_factory=list)

    @property
    def greedy(self) -> bool:
        return self.sampling.greedy

    @property
    def temperature(self) -> float:
        return self.sampling.logprob_temperature

    @property
    def penalised(self) -> bool:
        sampling = self.sampling
        return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)

    @property
    def truncated(self) -> bool:
        sampling = self.sampling
        return not self.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)


def draw_tokens(logits_RV: torch.Tensor, states: list[DrawState]) -> list[Draw]:
    """Draw one token for each row."""
    device = logits_RV.device
    temperatures = [state.temperature for state in states]
    scaled_RV = logits_RV
    if any(temperature != 1.0 for temperature in temperatures):
        scaled_RV = logits_RV / torch.tensor(temperatures, device=device)[:, None]
    logprobs_RV = torch.log_softmax(scaled_RV, dim=-1)
    choice_RV = logprobs_RV
    penalised = [row for row, state in enumerate(states) if state.penalised]
    if penalised:
        choice_RV = choice_RV.clone()
        for row in penalised:
            changed = _penalise(logits_RV[row], states[row]) / temperatures[row]
            choice_RV[row] = torch.log_softmax(changed, dim=-1)
    tokens_R = _choose(choice_RV, states)
    chosen_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    tops = _top(logprobs_RV, states)
    return [Draw(*row) for row in zip(tokens_R.tolist(), chosen_R.tolist(), tops, strict=True)]


def _choose(choice_RV: torch.Tensor, states: list[DrawState]) -> torch.Tensor:
    greedy = [state.greedy for state in states]
    best_R = choice_RV.argmax(dim=-1) if any(greedy) else None
    if best_R is not None and all(greedy):
        return best_R
    probabilities_RV = choice_RV.double().exp()
    truncated = [row for row, state in enumerate(states) if state.truncated]
    for row in truncated:
        probabilities_RV[row] = _truncate(probabilities_RV[row], states[row].sampling)
    # Inverse of the distribution function: one random number per token, whatever else is in the batch.
    cumulative_RV = probabilities_RV.cumsum(dim=-1)
    uniform = [0.0 if state.greedy else state.stream.random() for state in states]
    target_R1 = torch.tensor(uniform, dtype=torch.float64, device=choice_RV.device)[:, None] * cumulative_RV[:, -1:]
    drawn_R = torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0].clamp_max(choice_RV.shape[1] - 1)
    if best_R is None:
        return drawn_R
    return torch.where(torch.tensor(greedy, device=choice_RV.device), best_R, drawn_R)


def _truncate(probabilities_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero out what top_k, top_p and min_p exclude; the likeliest token always stays."""
    ordered_V, order_V = probabilities_V.sort(descending=True, stable=True)
    if 0 < sampling.top_k < len(ordered_V):
        ordered_V[sampling.top_k :] = 0.0
    if sampling.top_p < 1.0:
        before_V = ordered_V.cumsum(0) - ordered_V
        ordered_V[1:][before_V[1:] >= sampling.top_p * ordered_V.sum()] = 0.0
    if sampling.min_p > 0.0:
        ordered_V[1:][ordered_V[1:] < sampling.min_p * ordered_V[0]] = 0.0
    return torch.zeros_like(probabilities_V).scatter_(0, order_V, ordered_V)


def _penalise(logits_V: torch.Tensor, state: DrawState) -> torch.Tensor:
    """Presence and frequency penalties count drawn tokens; the repetition penalty counts the prompt's too."""
    sampling, device = state.sampling, logits_V.device
    changed_V = logits_V.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*state.prompt, *state.drawn}), device=device)
        values = changed_V[seen]
        penalty = sampling.repetition_penalty
        changed_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if state.drawn and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(state.drawn)
        tokens = torch.tensor(list(counts), device=device)
        times = torch.tensor([float(count) for count in counts.values()], device=device)
        changed_V[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return changed_V


def _top(logprobs_RV: torch.Tensor, states: list[DrawState]) -> list[list[tuple[int, float]] | None]:
    tops: list[list[tuple[int, float]] | None] = [None] * len(states)
    for row, state in enumerate(states):
        if state.top_logprobs:
            best = logprobs_RV[row].topk(min(state.top_logprobs, logprobs_RV.shape[1]))
            tops[row] = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return tops
