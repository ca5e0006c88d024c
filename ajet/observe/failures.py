"""`FailureTally`: why a run's episodes failed. Each reason is logged the first time, and from then on only counted."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from ajet.observe.logs import ONLY_TO_FILE, TRACEBACK
from ajet.schema.episode import Episode, EpisodeStatus, Failure

log = logging.getLogger(__name__)

_LOGGED_AGAIN = frozenset({10, 100, 1000, 10_000, 100_000})
_LINE_CHARS = 300


@dataclass(slots=True)
class Failed:
    """Episodes that failed alike."""

    status: str
    latest: Failure
    count: int = 0

    @property
    def line(self) -> str:
        """`44 × workflow_error, KeyError: 'search', at agent.py:17 in execute`"""
        return f"{self.count:,} × {self.status}, {_short(self.latest.in_short)}"


class FailureTally:
    """A run's failures. They are alike if status, kind and place are the same. Any thread may add."""

    def __init__(self) -> None:
        self.episodes = 0
        """All that were looked at, except cancelled ones: a cancellation follows from something else."""
        self._lock = threading.Lock()
        self._alike: dict[tuple[str, str, str], Failed] = {}

    def add(self, episode: Episode) -> Failed | None:
        """Count an episode. Returns the failures like its own, or None if it didn't fail."""
        if episode.status is EpisodeStatus.CANCELLED:
            return None
        with self._lock:
            self.episodes += 1
            failure = episode.failure
            if failure is None:
                return None
            key = (str(episode.status), failure.kind, failure.place)
            failed = self._alike.setdefault(key, Failed(str(episode.status), failure))
            failed.latest = failure
            failed.count += 1
            return failed

    def add_and_log(self, episode: Episode, *, only_to_file: bool = False) -> None:
        """Count an episode, and log what is new: a failure the first time, with its traceback, then at 10, 100, …

        `only_to_file`: the terminal shows the episode anyway.
        """
        failed = self.add(episode)
        if failed is None or (failed.count > 1 and failed.count not in _LOGGED_AGAIN):
            return
        reason = _short(failed.latest.in_short)
        extra: dict[str, object] = {ONLY_TO_FILE: only_to_file}
        if failed.count > 1:
            log.warning("%s for the %dth time: %s", failed.status, failed.count, reason, extra=extra)
            return
        extra[TRACEBACK] = failed.latest.traceback
        log.warning("%s in episode %s: %s", failed.status, episode.episode_id, reason, extra=extra)

    @property
    def failed(self) -> list[Failed]:
        """Most frequent first."""
        with self._lock:
            return sorted(self._alike.values(), key=lambda failed: -failed.count)

    @property
    def failures(self) -> int:
        """How many episodes failed."""
        return sum(failed.count for failed in self.failed)

    def lines(self, most: int = 3) -> list[str]:
        """The most frequent failures, one line each, and how many others there are."""
        failed = self.failed
        others = sum(one.count for one in failed[most:])
        return [one.line for one in failed[:most]] + ([f"{others:,} × other failures"] if others else [])


def _short(text: str) -> str:
    return text if len(text) <= _LINE_CHARS else f"{text[: _LINE_CHARS - 1]}…"
