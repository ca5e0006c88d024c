"""`linear_samples`: the smallest set of root-to-leaf rows that holds every trained token of a call tree.

`once`: a token is trained in the first row that holds it. `multiplicity`: in every row that holds it, as if the rows
were independent. Whatever exceeds the limits goes to the ledger, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ajet.context_tracker.rewards import leave_out
from ajet.context_tracker.settings import SharedTokenLoss, TrackerSettings
from ajet.schema.call_tree import ROOT, CallTree, Sample
from ajet.schema.episode import Episode, Ledger


def linear_samples(
    tree: CallTree,
    *,
    shared_token_loss: SharedTokenLoss = "once",
    max_prompt_length: int,
    max_response_length: int,
    max_samples: int,
    episode_id: str = "",
) -> tuple[list[Sample], Ledger]:
    """The rows, and where every sampled token of the tree went.

    If there are more than `max_samples` rows, those with the most trained tokens are kept. A row's prompt ends at its
    first trained token or at `max_prompt_length`, whichever comes first; the response is cut at `max_response_length`.
    """
    leaves = _leaves(tree)
    paths = [tree.path(leaf) for leaf in leaves]
    kept = _choose(tree, paths, max_samples)
    trained_at = {call: False for call in range(len(tree.calls))}
    samples: list[Sample] = []
    lost: dict[int, str] = {}
    kept_tokens: dict[int, int] = {}
    for path in kept:
        calls = [tree.runs[run].call for run in path]
        wanted = {call for call in calls if call != ROOT and tree.calls[call].mask.any()}
        if shared_token_loss == "once":
            wanted = {call for call in wanted if not trained_at[call]}
        for call in wanted:
            trained_at[call] = True
        sample, counts = _row(tree, path, wanted, max_prompt_length, max_response_length, episode_id)
        if sample is not None:
            samples.append(sample)
        for call, count in counts.items():
            kept_tokens[call] = max(count, kept_tokens.get(call, 0))
            if count < int(tree.calls[call].mask.sum()):
                lost[call] = "response_too_long" if sample is not None else "prompt_too_long"
    return samples, _account(tree, kept_tokens, lost)


def episode_samples(episode: Episode, settings: TrackerSettings) -> tuple[list[Sample], Ledger]:
    """`linear_samples` of an episode under the run's settings."""
    return linear_samples(
        episode.tree,
        shared_token_loss=settings.shared_token_loss,
        max_prompt_length=settings.max_prompt_length,
        max_response_length=settings.max_response_length,
        max_samples=settings.max_sample_per_task,
        episode_id=episode.episode_id,
    )


def _leaves(tree: CallTree) -> list[int]:
    """Trained runs that no trained run follows: one row each, and fewer rows could not hold them all."""
    followed = [False] * len(tree.runs)
    leaves = []
    for index in range(len(tree.runs) - 1, -1, -1):
        run = tree.runs[index]
        trained = run.call != ROOT and bool(tree.calls[run.call].mask.any())
        if trained and not followed[index]:
            leaves.append(index)
        if run.parent != ROOT and (trained or followed[index]):
            followed[run.parent] = True
    return sorted(leaves, key=lambda leaf: tree.runs[leaf].call)


def _choose(tree: CallTree, paths: Sequence[list[int]], limit: int) -> list[list[int]]:
    if len(paths) <= limit:
        return list(paths)

    def trained(path: list[int]) -> int:
        return sum(int(tree.calls[tree.runs[run].call].mask.sum()) for run in path if tree.runs[run].call != ROOT)

    ranked = sorted(range(len(paths)), key=lambda index: (-trained(paths[index]), index))
    return [paths[index] for index in sorted(ranked[:limit])]


def _row(
    tree: CallTree, path: list[int], wanted: set[int], max_prompt: int, max_response: int, episode_id: str
) -> tuple[Sample | None, dict[int, int]]:
    """A row and the number of trained tokens it holds of each call; no row if the limits leave none."""
    runs = [tree.runs[index] for index in path]
    ids = np.concatenate([run.ids for run in runs])
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    calls = np.full(len(ids), ROOT, np.int32)
    versions = np.full(len(ids), ROOT, np.int32)
    for run in runs:
        if run.call == ROOT:
            continue
        call, place = tree.calls[run.call], slice(run.start, run.start + len(run.ids))
        calls[place] = run.call
        logprobs[place] = call.logprobs
        for (first, version), (end, _) in zip(call.versions, [*call.versions[1:], (len(run.ids), 0)], strict=True):
            versions[run.start + first : run.start + end] = version
        if run.call in wanted:
            mask[place] = call.mask
    places = np.flatnonzero(mask)
    counts = dict.fromkeys(wanted, 0)
    if not len(places):
        return None, counts
    split = min(int(places[0]), max_prompt)
    places = places[places < split + max_response]
    if not len(places):
        return None, counts
    end = int(places[-1]) + 1
    for call, count in zip(*np.unique(calls[places], return_counts=True), strict=True):
        counts[int(call)] = int(count)
    sample = Sample(
        episode_id=episode_id,
        agent=tree.calls[runs[-1].call].agent,
        prompt_ids=ids[:split],
        response_ids=ids[split:end],
        response_mask=mask[split:end],
        logprobs=logprobs[split:end],
        call_of_token=calls[split:end],
        versions=versions[split:end],
        leaf=runs[-1].call,
    )
    return sample, counts


def _account(tree: CallTree, kept: dict[int, int], lost: dict[int, str]) -> Ledger:
    ledger = Ledger()
    for index, call in enumerate(tree.calls):
        if call.run == ROOT:
            continue
        count, trained = len(tree.runs[call.run].ids), int(call.mask.sum())
        ledger.captured += count
        if trained < count:
            leave_out(ledger, call.drop or "not_trainable", count - trained)
        ledger.trained += kept.get(index, 0)
        if missing := trained - kept.get(index, 0):
            leave_out(ledger, lost.get(index, "too_many_samples"), missing)
    ledger.balance()
    return ledger
