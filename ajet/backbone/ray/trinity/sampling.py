"""`WholeBatches`: Trinity's trainer reads exactly the rows whose credit was computed together, however many they are.

Trinity's own sampling reads a fixed number of experiences, so steps would drift away from batches. Here a step of the
trainer is a batch of the explorer. Rows of another batch that turn up meanwhile (a SQL store gives the newest first)
wait for the rest of theirs.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from trinity.algorithm.sample_strategy.sample_strategy import SampleStrategy
from trinity.algorithm.sample_strategy.utils import representative_sample
from trinity.buffer.buffer import get_buffer_reader
from trinity.common.config import BufferConfig
from trinity.common.experience import Experience
from trinity.utils.timer import Timer

from ajet.backbone.ray.credit import SEGMENTS
from ajet.backbone.ray.trinity.rows import BATCH, CREDIT, VERSIONS


class WholeBatches(SampleStrategy):  # type: ignore[misc]
    """`multiple`: rows are filled up, with rows that train nothing, to a multiple of it (ranks x updates).

    The other arguments are for our explorer and trainer, which read them from here.
    """

    def __init__(self, buffer_config: BufferConfig, *, multiple: int = 1, **_: Any) -> None:
        super().__init__(buffer_config)
        self._reader = get_buffer_reader(buffer_config.trainer_input.experience_buffer)
        self._multiple = multiple
        self._waiting: dict[str, list[Experience]] = {}

    async def sample(self, step: int, **_: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """The rows of one batch."""
        metrics: dict[str, float] = {}
        with Timer(metrics, "time/read_experience"):
            rows = await self._whole()
        metrics["sample/rows"] = float(len(rows))
        examples = representative_sample(rows)
        return filled(rows, self._multiple), metrics, examples

    async def _whole(self) -> list[Experience]:
        while True:
            missing = {name: rows[0].info[BATCH][1] - len(rows) for name, rows in self._waiting.items()}
            for name, count in missing.items():
                if count == 0:
                    return self._waiting.pop(name)
            wanted = min(missing.values()) if missing else 1
            for exp in await self._reader.read(batch_size=wanted):
                self._waiting.setdefault(exp.info[BATCH][0], []).append(exp)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"multiple": 1, "updates": 1, "max_staleness": None}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._reader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._reader.load_state_dict(state_dict)


def filled(rows: list[Experience], multiple: int) -> list[Experience]:
    """The rows and, if needed, copies of the shortest that train nothing."""
    shortest = min(rows, key=lambda exp: len(exp.tokens))
    added = []
    for _ in range(-len(rows) % multiple):
        blank = deepcopy(shortest)
        blank.action_mask = torch.zeros_like(shortest.action_mask)
        blank.advantages = torch.zeros_like(shortest.advantages)
        blank.info |= {CREDIT: [], SEGMENTS: [], VERSIONS: []}
        added.append(blank)
    return rows + added
