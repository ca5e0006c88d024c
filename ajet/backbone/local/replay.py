"""`Replay`: groups of the last steps that are trained once more, beside the new ones.

Each sampled token carries the log-probability that it had when it was drawn, so `rollout_correction` weighs a replayed
token by how its probability has changed since. Only groups that teach something are kept. What is drawn depends on the
seed and the step, and the groups are part of a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ajet.observe.episode_codec import decode_episode, encode_episode
from ajet.schema.episode import EpisodeGroup

if TYPE_CHECKING:
    from ajet.config import Config

FILE = "replay.msgpack"
"""In a checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class _Kept:
    step: int
    """In which its episodes were sampled."""
    group: EpisodeGroup


class Replay:
    """The groups of at most `max_age` steps before the present one, of which `groups` are trained again per step."""

    def __init__(self, groups: int, max_age: int, seed: int) -> None:
        self.groups = groups
        self.max_age = max_age
        self.seed = seed
        self._kept: deque[_Kept] = deque()

    @classmethod
    def from_config(cls, config: Config) -> Replay:
        common = config.ajet.trainer_common
        return cls(common.algorithm.replay.groups, common.algorithm.replay.max_age, common.seed)

    def draw(self, step: int) -> list[EpisodeGroup]:
        """The past groups that this step trains, in the order in which they were sampled."""
        kept = self._young(step)
        order = np.random.default_rng([self.seed, step]).permutation(len(kept))
        return [kept[index].group for index in sorted(order[: self.groups].tolist())]

    def add(self, step: int, groups: Sequence[EpisodeGroup]) -> None:
        """A step is complete: keep those of its groups that taught something, and forget those that grew too old."""
        if not self.groups:
            return
        self._kept.extend(
            _Kept(step, EpisodeGroup(group.group_id, group.task_id, list(group.episodes))) for group in groups
        )
        self._kept = deque(self._young(step + 1))

    def __len__(self) -> int:
        return len(self._kept)

    def write(self, folder: Path) -> None:
        """Add the groups to a checkpoint's folder."""
        if self.groups:
            stored = [
                {
                    "step": kept.step,
                    "group_id": kept.group.group_id,
                    "task_id": kept.group.task_id,
                    "episodes": [encode_episode(episode) for episode in kept.group.episodes],
                }
                for kept in self._kept
            ]
            (folder / FILE).write_bytes(msgspec.msgpack.encode(stored))

    def read(self, folder: Path) -> None:
        """Continue with a checkpoint's groups; a checkpoint of a run without replay has none."""
        if self.groups and (folder / FILE).is_file():
            stored: list[dict[str, Any]] = msgspec.msgpack.decode((folder / FILE).read_bytes())
            self._kept = deque(
                _Kept(
                    int(one["step"]),
                    EpisodeGroup(one["group_id"], one["task_id"], [decode_episode(data) for data in one["episodes"]]),
                )
                for one in stored
            )

    def _young(self, step: int) -> list[_Kept]:
        return [kept for kept in self._kept if 0 < step - kept.step <= self.max_age]
