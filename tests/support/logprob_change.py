"""How training changed the probabilities of the tokens it trained, with any backbone.

For a run that kept the weights of every step, the recorded tokens of each training episode are read again, under the
weights that sampled them and under those of the next step. Plain `transformers` passes are used, so neither the
trainer's nor the engine's own arithmetic is involved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ajet.observe.episode_store import EpisodeFilter, EpisodeStore, RecordedEpisode
from ajet.schema.episode import CallTree

PASS_ROWS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """How much the update that trained an episode changed the log-probability of its tokens."""

    step: int
    advantage: float
    change: float
    """Mean over its trained tokens, in nats."""
    sampler_gap: float
    """The largest difference between a recorded log-probability and the one that the weights before the step give."""


def changes(episodes: Path, weights: Mapping[int, Path]) -> list[Change]:
    """The change of each recorded training episode with an advantage, step by step.

    `weights` maps steps to Hugging Face folders; 0 stands for the initial weights. A step without weights before and
    after it is skipped.
    """
    store = EpisodeStore(episodes)
    found: list[Change] = []
    try:
        for step in sorted(weights):
            if step - 1 not in weights:
                continue
            mine = store.all(EpisodeFilter(step_min=step, step_max=step, validation=False))
            trained = [one for one in mine if one.annotation.credit is not None and one.episode.tree.trained_tokens]
            found += _of_step(trained, weights[step - 1], weights[step])
    finally:
        store.close()
    return [change for change in found if change.advantage]


def summary(found: Iterable[Change]) -> dict[str, float]:
    """Compare better episodes with worse ones."""
    found = list(found)
    better = [one.change for one in found if one.advantage > 0]
    worse = [one.change for one in found if one.advantage < 0]
    return {
        "better_episodes": len(better),
        "better_mean_change": fmean(better),
        "better_that_rose": sum(change > 0 for change in better) / len(better),
        "worse_episodes": len(worse),
        "worse_mean_change": fmean(worse),
        "worse_that_fell": sum(change < 0 for change in worse) / len(worse),
        "largest_sampler_gap": max(one.sampler_gap for one in found),
    }


def _of_step(trained: Sequence[RecordedEpisode], before: Path, after: Path) -> list[Change]:
    calls = [(one, index) for one in trained for index, call in enumerate(one.episode.tree.calls) if call.mask.any()]
    rows = [_row(one.episode.tree, index) for one, index in calls]
    old, new = logprobs(before, rows), logprobs(after, rows)
    result = []
    for one in trained:
        tree, credit = one.episode.tree, one.annotation.credit or []
        mine = [at for at, (owner, _) in enumerate(calls) if owner is one]
        masks = {at: torch.from_numpy(tree.calls[calls[at][1]].mask) for at in mine}
        drawn = {at: torch.from_numpy(tree.calls[calls[at][1]].logprobs) for at in mine}
        change = torch.cat([(new[at] - old[at])[masks[at]] for at in mine])
        gap = torch.cat([(old[at] - drawn[at])[masks[at]] for at in mine])
        advantages = [credit[calls[at][1]].advantage for at in mine]
        result.append(Change(one.step, fmean(advantages), float(change.mean()), float(gap.abs().max())))
    return result


def _row(tree: CallTree, index: int) -> tuple[list[int], int]:
    """A call's prompt and reply, and where the reply begins."""
    prompt = tree.prompt_ids(index).tolist()
    return prompt + tree.runs[tree.calls[index].run].ids.tolist(), len(prompt)


@torch.no_grad()
def logprobs(weights: Path, rows: Sequence[tuple[list[int], int]]) -> list[torch.Tensor]:
    """The log-probabilities of each row's tokens after its prompt, under these weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    found: list[torch.Tensor] = []
    for begin in range(0, len(rows), PASS_ROWS):
        part = rows[begin : begin + PASS_ROWS]
        longest = max(len(ids) for ids, _ in part)
        ids_RT = torch.tensor(
            [ids + [0] * (longest - len(ids)) for ids, _ in part]
        )  # padded on the right: never attended to
        scores_RTV = torch.log_softmax(model(input_ids=ids_RT).logits[:, :-1], -1)
        scores_RT = scores_RTV.gather(-1, ids_RT[:, 1:, None]).squeeze(-1)
        found += [row[prompt - 1 : len(ids) - 1] for row, (ids, prompt) in zip(scores_RT, part, strict=True)]
    return found
