"""Episodes made by hand for the verl tests: linear and branching call trees over a tiny vocabulary."""

from __future__ import annotations

import numpy as np

from ajet.schema.chat import Sampling
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeStatus, Ledger, Run

FIRST_ID = 10


def _ids(rng: np.random.Generator, vocab: int, count: int) -> np.ndarray:
    return rng.integers(FIRST_ID, vocab, count).astype(np.int32)


def make_tree(rng: np.random.Generator, shape: list[int], *, vocab: int = 200, agents: int = 1) -> CallTree:
    """`shape[i]` is the call that call i continues; ROOT: it starts from the question alone."""
    question = Run(_ids(rng, vocab, 7), ROOT, 0)
    tree = CallTree([question])
    for index, above in enumerate(shape):
        parent = 0 if above == ROOT else tree.calls[above].run
        start = tree.runs[parent].start + len(tree.runs[parent].ids)
        prompt = Run(_ids(rng, vocab, int(rng.integers(2, 5))), parent, start)
        tree.runs.append(prompt)
        reply = _ids(rng, vocab, int(rng.integers(3, 9)))
        tree.runs.append(Run(reply, len(tree.runs) - 1, start + len(prompt.ids), call=index))
        mask = np.ones(len(reply), np.bool_)
        mask[0] = index % 2 == 0  # some sampled tokens are not trained
        tree.calls.append(
            Call(
                name=f"call-{index}",
                agent=f"agent{index % agents}",
                target="t",
                turn=index,
                prompt_run=len(tree.runs) - 2,
                prompt_tokens=start + len(prompt.ids),
                run=len(tree.runs) - 1,
                logprobs=rng.normal(-5.0, 0.3, len(reply)).astype(np.float32),
                mask=mask,
                versions=[(0, 3)],
                sampling=Sampling(temperature=1.0),
                extends=above,
            )
        )
    return tree


LINEAR = [ROOT, 0, 1]
BRANCHING = [ROOT, 0, 0, ROOT, 3]


def make_groups(shape: list[int], *, groups: int = 2, size: int = 3, seed: int = 0) -> list[list[Episode]]:
    """Groups of episodes of the same shape, with rewards that differ within each group."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        episodes = [
            Episode(
                f"e{group}-{repeat}",
                f"task{group}",
                EpisodeStatus.COMPLETED,
                make_tree(rng, shape[: max(1, len(shape) - repeat % 2)]),
                Ledger(),
                group_id=f"g{group}",
                repeat=repeat,
                reward=float(rng.normal()),
                is_success=repeat == 0,
            )
            for repeat in range(size)
        ]
        made.append(episodes)
    return made
