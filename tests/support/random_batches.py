"""Random call trees for the trainer's tests: forks, shared prompts, masked tokens, several episodes."""

from __future__ import annotations

import numpy as np

from ajet.schema.chat import Sampling
from ajet.schema.episode import ROOT, Call, CallTree, Episode, EpisodeStatus, Ledger, Run
from ajet.trainer.credit import Credit, CreditSettings, EpisodeSummary, compute_credit, summarise
from ajet.trainer.credit.estimators import EpisodeCredit


def random_tree(
    rng: np.random.Generator, *, vocab: int, system: np.ndarray, calls: int, run: int = 6, branch: float = 0.4
) -> CallTree:
    """A tree whose calls extend an earlier one (with probability 1 - branch) or start over from the system prompt."""
    tree = CallTree([Run(system.astype(np.int32), ROOT, 0)])

    def ids() -> np.ndarray:
        return rng.integers(0, vocab, rng.integers(1, run + 1)).astype(np.int32)

    def end(index: int) -> int:
        return tree.runs[index].start + len(tree.runs[index].ids)

    for index in range(calls):
        parent = 0
        if index and rng.random() > branch:
            parent = tree.calls[int(rng.integers(0, index))].run
        again = [c for c in tree.calls if tree.runs[c.prompt_run].parent == parent]
        if again and rng.random() < 0.3:
            prompt = again[0].prompt_run  # another reply to the same prompt
        else:
            tree.runs.append(Run(ids(), parent, end(parent)))
            prompt = len(tree.runs) - 1
        reply = ids()
        tree.runs.append(Run(reply, prompt, end(prompt), call=index))
        mask = rng.random(len(reply)) < 0.8
        if rng.random() < 0.15:
            mask[:] = False
        call = Call(
            name=f"c{index}",
            agent=str(rng.choice(["solver", "critic"])),
            target="t",
            turn=index,
            prompt_run=prompt,
            prompt_tokens=end(prompt),
            run=len(tree.runs) - 1,
            logprobs=rng.normal(-2.0, 0.5, len(reply)).astype(np.float32),
            mask=mask,
            sampling=Sampling(temperature=float(rng.choice([0.0, 0.7, 1.0]))),
            reward=float(rng.normal()) if rng.random() < 0.3 else None,
        )
        tree.calls.append(call)
    return tree


def random_batch(
    seed: int,
    *,
    vocab: int = 32,
    groups: int = 2,
    repeat: int = 2,
    calls: int = 5,
    settings: CreditSettings | None = None,
) -> tuple[list[Episode], list[EpisodeSummary], Credit]:
    """Groups of episodes that share prompts, with the credit that random rewards give them."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, vocab, 5)
    episodes = []
    for group in range(groups):
        question = rng.integers(0, vocab, 4)
        for repeat_index in range(repeat):
            tree = random_tree(
                rng, vocab=vocab, system=np.concatenate([system, question]), calls=int(rng.integers(1, calls + 1))
            )
            episodes.append(
                Episode(
                    f"e{group}.{repeat_index}",
                    f"t{group}",
                    EpisodeStatus.COMPLETED,
                    tree,
                    Ledger(),
                    group_id=f"g{group}",
                    repeat=repeat_index,
                    reward=float(rng.normal()),
                )
            )
    summaries = [summarise(episode) for episode in episodes]
    by_group = [summaries[i : i + repeat] for i in range(0, len(summaries), repeat)]
    return episodes, summaries, compute_credit(by_group, settings or CreditSettings())


def credited_batch(seed: int = 0, *, groups: int = 3, repeat: int = 3) -> list[tuple[CallTree, EpisodeCredit]]:
    """What a trainer gets."""
    episodes, _, credit = random_batch(seed, groups=groups, repeat=repeat)
    return [(episode.tree, given) for episode, given in zip(episodes, credit.episodes, strict=True)]
