"""The papers' formulas, written out plainly with numpy on lists of turns, and random batches to try them on.

Shares no code with `ajet.trainer.credit`: an episode here is a list of turns, each an agent's, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from ajet.trainer.credit import CallSummary, EpisodeSummary

EPS = 1e-6


@dataclass
class Turn:
    agent: str
    tokens: int
    reward: float | None = None
    replace: bool = False
    penalty: float = 0.0
    state: str = ""
    leaves: list[int] = field(default_factory=list)
    """The last turns of the rows that hold this one."""


@dataclass
class Played:
    """One episode: its turns, its reward, and the rewards of single agents."""

    turns: list[Turn]
    reward: float
    agents: dict[str, float] = field(default_factory=dict)
    cut: bool = False

    def of(self, agent: str) -> list[int]:
        return [index for index, turn in enumerate(self.turns) if turn.agent == agent]

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def row_tokens(self) -> int:
        return sum(turn.tokens * len(turn.leaves) for turn in self.turns)

    def summary(self, name: str) -> EpisodeSummary:
        """The same episode as `ajet.trainer.credit` reads it."""
        calls = []
        for index, turn in enumerate(self.turns):
            mine = self.of(turn.agent)
            at = mine.index(index)
            calls.append(
                CallSummary(
                    turn.agent,
                    turn.tokens,
                    turn.reward,
                    turn.replace,
                    turn.penalty,
                    next=mine[at + 1] if at + 1 < len(mine) else -1,
                    previous=mine[at - 1] if at else -1,
                    state=turn.state,
                    leaves=turn.leaves,
                )
            )
        return EpisodeSummary(name, "g", self.reward, calls, dict(self.agents), cut=self.cut)


def random_batch(rng: np.random.Generator, *, groups: int = 5, size: int = 6) -> list[list[Played]]:
    """Ragged turns, one to three agents, rewards at every level, untrained turns, repeated states, constant groups."""
    return [[_random_episode(rng, constant=group == 0) for _ in range(size)] for group in range(groups)]


def _random_episode(rng: np.random.Generator, *, constant: bool) -> Played:
    agents = ["solver", "critic", "judge"][: int(rng.integers(1, 4))]
    turns = []
    for _ in range(int(rng.integers(1, 7))):
        rewarded = not constant and rng.random() < 0.3
        turns.append(
            Turn(
                str(rng.choice(agents)),
                int(rng.integers(1, 40)) if rng.random() < 0.9 else 0,
                float(rng.normal()) if rewarded else None,
                rewarded and rng.random() < 0.3,
                0.0 if constant else float(rng.random() < 0.2) * 0.1,
                state=str(rng.choice(["hall", "door", "stairs"])),
            )
        )
    for index, turn in enumerate(turns):
        later = [i for i in range(index, len(turns)) if turns[i].agent == turn.agent and turns[i].tokens]
        turn.leaves = sorted({int(leaf) for leaf in rng.choice(later, 2)}) if turn.tokens else []
    own = {"critic": float(rng.integers(0, 3))} if "critic" in agents and not constant and rng.random() < 0.5 else {}
    return Played(turns, 1.0 if constant else float(rng.integers(0, 2)), own, cut=rng.random() < 0.2)


# ------------------------------------------------------------------------------------------------------- returns


def own_rewards(episode: Played, agent: str) -> np.ndarray:
    return np.array([(episode.turns[i].reward or 0.0) - episode.turns[i].penalty for i in episode.of(agent)])


def outcome_from(episode: Played, agent: str, at: int) -> float:
    """The outcome, as the agent's turn `at` sees it: nothing, if a reward from there on replaces it."""
    replaced = any(episode.turns[i].replace for i in episode.of(agent)[at:])
    return 0.0 if replaced else episode.agents.get(agent, episode.reward)


def return_to_go(episode: Played, agent: str, at: int, gamma: float) -> float:
    rewards = own_rewards(episode, agent)[at:]
    powers = gamma ** np.arange(len(rewards))
    return float(rewards @ powers + powers[-1] * outcome_from(episode, agent, at))


def whole_return(episode: Played, agent: str, at: int) -> float:
    return float(own_rewards(episode, agent).sum() + outcome_from(episode, agent, at))


# ---------------------------------------------------------------------------------------------------- advantages


def scaled(value: float, samples: list[np.ndarray], own: int, kind: str) -> float:
    """A value against samples of equal weight, of which the one at `own` is its own episode's."""
    every = np.concatenate(samples)
    if np.ptp(every) <= 1e-9 * max(1.0, np.abs(every).max()):
        return 0.0
    means = np.array([sample.mean() for sample in samples])
    if kind == "drgrpo":
        return float(value - means.mean())
    if kind == "rloo":
        return float(value - np.delete(means, own).mean())
    squares = np.array([((sample - means.mean()) ** 2).mean() for sample in samples])
    return float((value - means.mean()) / (np.sqrt(squares.sum() / (len(samples) - 1)) + EPS))


def counted(episode: Played, places: list[int]) -> list[int]:
    """Positions (of one agent, in one episode) that stand in the statistics: the trained ones, if there are any."""
    return [i for i in places if episode.turns[i].tokens] or places


def at_of(episode: Played, index: int) -> int:
    return episode.of(episode.turns[index].agent).index(index)


def episode_advantage(group: list[Played], number: int, index: int, kind: str) -> float:
    agent = group[number].turns[index].agent
    present = [n for n, episode in enumerate(group) if episode.of(agent)]
    if len(present) < 2:
        return 0.0
    samples = [
        np.array([whole_return(group[n], agent, at_of(group[n], i)) for i in counted(group[n], group[n].of(agent))])
        for n in present
    ]
    value = whole_return(group[number], agent, at_of(group[number], index))
    return scaled(value, samples, present.index(number), kind)


def turn_advantage(group: list[Played], number: int, index: int, kind: str, gamma: float) -> float:
    agent, at = group[number].turns[index].agent, at_of(group[number], index)
    present = [n for n, episode in enumerate(group) if len(episode.of(agent)) > at]
    if len(present) < 2:
        return episode_advantage(group, number, index, kind)
    samples = [np.array([return_to_go(group[n], agent, at, gamma)]) for n in present]
    return scaled(float(samples[present.index(number)][0]), samples, present.index(number), kind)


def gigpo_advantage(group: list[Played], number: int, index: int, kind: str, gamma: float, omega: float) -> float:
    """A^E + omega A^S; a state that a single episode visited has no step advantage. (Of untrained turns: A^E.)"""
    turn = group[number].turns[index]
    visits = []
    for n, episode in enumerate(group):
        here = [i for i in episode.of(turn.agent) if episode.turns[i].state == turn.state]
        visits += [(n, i) for i in counted(episode, here)]
    episodes = {n for n, e in enumerate(group) for i in e.of(turn.agent) if e.turns[i].state == turn.state}
    step = 0.0
    if len(episodes) > 1:
        samples = [np.array([return_to_go(group[n], turn.agent, at_of(group[n], i), gamma)]) for n, i in visits]
        value = return_to_go(group[number], turn.agent, at_of(group[number], index), gamma)
        if (number, index) in visits:
            step = scaled(value, samples, visits.index((number, index)), kind)
    return episode_advantage(group, number, index, kind) + omega * step


def batch_deviations(batch: list[list[Played]], rows: list[list[list[float]]]) -> list[list[list[float]]]:
    """REINFORCE++ with a baseline: (A - mean) / std over the batch, agent by agent, an episode being one sample."""
    result = [[[0.0] * len(e.turns) for e in group] for group in batch]
    for agent in {turn.agent for group in batch for e in group for turn in e.turns}:
        samples = [
            np.array([row[i] for i in counted(e, e.of(agent))])
            for group, rs in zip(batch, rows, strict=True)
            for e, row in zip(group, rs, strict=True)
            if e.of(agent)
        ]
        mean = np.mean([s.mean() for s in samples])
        square = np.sum([((s - mean) ** 2).mean() for s in samples])
        deviation = np.sqrt(square / (len(samples) - 1)) if len(samples) > 1 else 0.0
        for g, group in enumerate(batch):
            for n, e in enumerate(group):
                for i in e.of(agent):
                    result[g][n][i] = float((rows[g][n][i] - mean) / (deviation + EPS))
    return result


def pass_at_k(successes: list[bool], k: int) -> list[float]:
    """By looking at every subset of k episodes."""
    subsets = list(combinations(range(len(successes)), k))
    rewards = np.array([float(any(successes[i] for i in subset)) for subset in subsets])
    if rewards.std() == 0:
        return [0.0] * len(successes)
    standard = (rewards - rewards.mean()) / rewards.std()
    return [
        float(np.mean([value for value, subset in zip(standard, subsets, strict=True) if i in subset]))
        for i in range(len(successes))
    ]


def advantages(
    batch: list[list[Played]],
    estimator: str,
    baseline: str = "episode",
    *,
    gamma: float = 1.0,
    omega: float = 1.0,
    k: int = 3,
) -> list[list[list[float]]]:
    """Batch, group, episode, turn."""
    if estimator == "pass_at_k":
        return [
            [[a] * len(e.turns) for e, a in zip(g, pass_at_k([e.reward >= 1.0 for e in g], k), strict=True)]
            for g in batch
        ]
    if estimator == "reinforce_plus_plus":
        everyone = [episode for group in batch for episode in group]
        spread = iter(_within(everyone, "grpo", baseline, gamma, omega))
        return [[next(spread) for _ in group] for group in batch]
    if estimator == "reinforce_plus_plus_baseline":
        return batch_deviations(batch, [_within(group, "drgrpo", baseline, gamma, omega) for group in batch])
    return [_within(group, estimator, baseline, gamma, omega) for group in batch]


def _within(group: list[Played], kind: str, baseline: str, gamma: float, omega: float) -> list[list[float]]:
    def one(number: int, index: int) -> float:
        if baseline == "turn":
            return turn_advantage(group, number, index, kind, gamma)
        if baseline == "state":
            return gigpo_advantage(group, number, index, kind, gamma, omega)
        return episode_advantage(group, number, index, kind)

    return [[one(n, i) for i in range(len(episode.turns))] for n, episode in enumerate(group)]


def weight(norm: str, counts: list[int], everyone: int, own: int, length: float) -> float:
    """Of a token (in one row) of an episode with `own` of them trained; `counts` are those of all trained episodes."""
    if norm == "token_mean":
        return 1.0 / sum(counts)
    return 1.0 / (len(counts) * own) if norm == "sequence_mean" else 1.0 / (everyone * length)


def entries(
    batch: list[list[Played]], norm: str, *, multiplicity: bool, length: float
) -> list[list[tuple[float, float]]]:
    """(advantage, weight) of the batch's turns, under GRPO: none in groups without variance, nor in cut episodes."""
    rows = advantages(batch, "grpo")
    flat = [not any(map(any, group)) for group in rows]
    trained = [not same and not e.cut for group, same in zip(batch, flat, strict=True) for e in group]
    everyone = [e for group in batch for e in group]
    tokens = [e.row_tokens if multiplicity else e.tokens for e in everyone]
    counts = [count for count, kept in zip(tokens, trained, strict=True) if kept and count]
    found = []
    for e, row, count, kept in zip(everyone, [row for group in rows for row in group], tokens, trained, strict=True):
        for index, turn in enumerate(e.turns):
            if not kept or not turn.tokens:
                found.append([])
                continue
            each = weight(norm, counts, len(everyone), count, length)
            found.append([(row[leaf], each) for leaf in (turn.leaves if multiplicity else [index])])
    return found
