"""The soak's oracle: what a run must have kept, whatever was done to it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ajet.backbone.metrics import played
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.run_files import whole_record
from ajet.schema.episode import EpisodeStatus, LedgerImbalance

WARM_STEPS, LEAST_SAMPLES = 5, 12
"""The first steps of a life aren't compared: caches fill."""
MEMORY_SHARE, MORE_FDS = 1.25, 20


@dataclass
class Life:
    """One start of the run, until its end."""

    pid: int
    wrapper: str
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    """Steps in this life, MiB of memory, descriptors."""


def findings(experiment: Path, told: Path, output: Path, lives: list[Life]) -> dict[str, Any]:
    """What was found, and under `wrong` what must not be."""
    wrong: list[str] = []
    lines = map(whole_record, (experiment / "metrics.jsonl").open(encoding="utf-8"))
    steps = [record for record in lines if record is not None and "reward/mean" in record]
    numbers = [int(record["step"]) for record in steps]
    if numbers != list(range(1, len(numbers) + 1)):
        wrong.append(f"the steps of metrics.jsonl are not 1 to {len(numbers)}, each once: {numbers}")
    said = output.read_text(errors="replace")
    lost = len(re.findall("episode not recorded", said))
    lost += sum(map(int, re.findall(r"lacks (\d+) episodes", said)))
    if "Traceback (most recent call last)" in said:
        at = said.index("Traceback (most recent call last)")
        wrong.append(f"a traceback: {said[at : at + 1500]}")
    counts, sampled = _episodes(experiment, told, numbers, wrong)
    expected = sum(int(record["episode/count"]) for record in steps)
    if not lost:
        wrong += [
            f"step {record['step']}: {sampled[record['step']]} tokens sampled in what is stored, and its metrics say "
            f"{record['episode/sampled_tokens_total']:.0f}"
            for record in steps
            if sampled[record["step"]] != record["episode/sampled_tokens_total"]
        ]
    if not expected - lost <= counts["of ended steps"] <= expected:
        wrong.append(
            f"{counts['of ended steps']} episodes stored; the metrics count {expected}, the log says {lost} lost"
        )
    growth = [_growth(life, wrong) for life in lives]
    return {
        "wrong": wrong,
        "steps": len(numbers),
        "episodes": dict(counts),
        "not_recorded_and_said": lost,
        "curve": [round(record["reward/mean"], 4) for record in steps],
        "early_and_late": [one for one in growth if one],
    }


def _episodes(
    experiment: Path, told: Path, steps: list[int], wrong: list[str]
) -> tuple[Counter[str], Counter[int | None]]:
    """Go through every stored episode: counts, and each step's sampled tokens."""
    rewards = {record["id"]: record["reward"] for line in told.read_text().splitlines() if (record := json.loads(line))}
    counts: Counter[str] = Counter()
    of_step: Counter[int | None] = Counter()
    seen: set[str] = set()
    for recorded in EpisodeStore(experiment / "episodes.sqlite").all():
        episode = recorded.episode
        counts["stored"] += 1
        counts["of ended steps"] += recorded.step in steps
        counts[str(episode.status)] += 1
        if episode.episode_id in seen:
            wrong.append(f"episode {episode.episode_id} is stored twice")
        seen.add(episode.episode_id)
        try:
            episode.ledger.balance()
        except LedgerImbalance as error:
            wrong.append(f"episode {episode.episode_id}: {error}")
        sampled = sum(len(call.logprobs) for call in episode.tree.calls)
        counts["sampled tokens"] += sampled
        of_step[recorded.step] += sum(one.tree.sampled_tokens for one in played([episode]))
        if episode.ledger.captured != sampled:
            wrong.append(f"episode {episode.episode_id}: {sampled} tokens sampled, {episode.ledger.captured} captured")
        if episode.status is EpisodeStatus.COMPLETED:
            if episode.episode_id not in rewards:
                wrong.append(f"episode {episode.episode_id} is complete, and its workflow returned no reward")
            elif episode.reward != rewards[episode.episode_id]:
                wrong.append(
                    f"episode {episode.episode_id}: reward {episode.reward}, not {rewards[episode.episode_id]}"
                )
    counts["told by workflows"] = len(rewards)
    return counts, of_step


def _growth(life: Life, wrong: list[str]) -> dict[str, Any] | None:
    """Memory, and the fewest descriptors, of a life early and late."""
    samples = [sample for sample in life.samples if sample[0] >= WARM_STEPS]
    if len(samples) < LEAST_SAMPLES:
        return None
    early, late = samples[: len(samples) // 3], samples[-(len(samples) // 3) :]
    mb = [int(median(sample[1] for sample in part)) for part in (early, late)]
    fds = [min(sample[2] for sample in part) for part in (early, late)]  # between two steps: an episode has many
    if mb[1] > MEMORY_SHARE * mb[0] + 50:
        wrong.append(f"memory of a {life.wrapper} life: {mb[0]} MiB early, {mb[1]} late")
    if fds[1] > fds[0] + MORE_FDS:
        wrong.append(f"descriptors of a {life.wrapper} life: {fds[0]} early, {fds[1]} late")
    return {"wrapper": life.wrapper, "steps": samples[-1][0], "mb": mb, "descriptors": fds}
