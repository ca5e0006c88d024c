"""What a run came to: its exit code. A run that trained nothing is no success, whatever the backbone."""

from __future__ import annotations

import logging
from pathlib import Path

from ajet.observe.metrics import read_metrics

log = logging.getLogger(__name__)

EXIT_NOTHING_TRAINED = 1
NOTHING_TRAINED = (
    "nothing was trained: no step had a group whose episodes earned different rewards. Look at the episodes, and at "
    "the task's reward."
)


def exit_code(folder: Path, after: int) -> int:
    """Of a run that went through the steps behind `after`, as its experiment's metrics tell it."""
    if trained_nothing(folder, after):
        log.error(NOTHING_TRAINED)
        return EXIT_NOTHING_TRAINED
    return 0


def trained_nothing(folder: Path, after: int) -> bool:
    """Whether there were steps behind `after` and none of them had an episode that taught anything."""
    counts = [
        step["credit/episodes_trained"]
        for step in read_metrics(folder / "metrics.jsonl")
        if step["step"] > after and "credit/episodes_trained" in step
    ]
    return bool(counts) and not any(counts)
