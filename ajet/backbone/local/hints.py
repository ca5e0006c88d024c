"""What the run's log says about its episodes, once each: why calls branch off, and that much is not trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ajet.context_tracker import describe_reasons, top_reasons
from ajet.schema.episode import Episode

log = logging.getLogger("ajet.backbone.local")

MANY_ABANDONED = 0.5
"""Share of a step's sampled tokens from which on masking them is worth a word."""


class Hints:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._abandoned = False

    def look_at(self, step: int, episodes: Sequence[Episode]) -> None:
        """Log what is new about the episodes of this step."""
        trees = [episode.tree for episode in episodes]
        found = {reason.reason for reason in top_reasons(trees)}
        if not found <= self._reasons:
            self._reasons |= found
            for line in describe_reasons(trees):
                log.info("step %d, calls that continue no earlier call: %s", step, line)
        captured = sum(episode.ledger.captured for episode in episodes)
        abandoned = sum(episode.ledger.masked.get("abandoned", 0) for episode in episodes)
        if not self._abandoned and abandoned > MANY_ABANDONED * captured:
            self._abandoned = True
            log.warning(
                "step %d: %d of %d sampled tokens are not trained, because a later reply to the very same prompt took "
                "their place (masked/abandoned). If your agent asks the same again on purpose, and not to retry, set "
                "ajet.rollout.abandoned_calls: train",
                step,
                abandoned,
                captured,
            )
