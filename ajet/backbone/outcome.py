"""What a run came to: its exit code. A run that trained nothing is no success, whatever the backbone."""

from __future__ import annotations

from pathlib import Path

from ajet.observe.metrics import read_metrics

EXIT_NOTHING_TRAINED = 1
NOTHING_TRAINED = (
    "nothing was trained: no step had a group whose episodes earned different rewards. Look at the episodes, and at "
    "the task's reward."
)


def trained_nothing(folder: Path, after: int) -> bool:
    """Whether there were steps behind `after` and none of them had an episode that taught anything."""
    counts = [
        step["credit/episodes_trained"]
        for step in read_metrics(folder / "metrics.jsonl")
        if step["step"] > after and "credit/episodes_trained" in step
    ]
    return bool(counts) and not any(counts)
