"""`WholeBatches`: Trinity's trainer reads exactly the rows whose credit was computed together, however many they are.

Trinity's own sampling reads a fixed number of experiences, so steps would drift away from batches. Here a step of the
trainer is a batch of the explorer. Rows of another batch that turn up meanwhile (a SQL store gives the newest first)
wait for the rest of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from trinity.algorithm.sample_strategy.sample_strategy import SampleStrategy
from trinity.algorithm.sample_strategy.utils import representative_sample
from trinity.buffer.buffer import get_buffer_reader
from trinity.common.config import BufferConfig
from trinity.common.experience import Experience
from trinity.utils.timer import Timer

from ajet.backbone.ray.credit import SEGMENTS, BatchRow, lay_out
from ajet.backbone.ray.trinity.rows import BATCH, ROW, UPDATES, VERSIONS
from ajet.trainer.credit import LossNorm


class WholeBatches(SampleStrategy):  # type: ignore[misc]
    """`ranks`: data-parallel ranks of the trainer. `updates`: of a step.

    `max_staleness` is for our explorer, which reads it from here.
    """

    def __init__(
        self,
        buffer_config: BufferConfig,
        *,
        ranks: int = 1,
        updates: int = 1,
        norm: str = "token_mean",
        seed: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(buffer_config)
        self._reader = get_buffer_reader(buffer_config.trainer_input.experience_buffer)
        self._ranks, self._updates, self._norm, self._seed = ranks, updates, LossNorm(norm), seed
        self._waiting: dict[str, list[Experience]] = {}

    async def sample(self, step: int, **_: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """The rows of one batch."""
        metrics: dict[str, float] = {}
        with Timer(metrics, "time/read_experience"):
            rows = await self._whole()
        metrics["sample/rows"] = float(len(rows))
        examples = representative_sample(rows)
        seed = (self._seed, (step - 1) * self._updates)
        placed = in_place(rows, norm=self._norm, updates=self._updates, ranks=self._ranks, seed=seed)
        return placed, metrics, examples

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
        return {"ranks": 1, "updates": 1, "norm": "token_mean", "seed": 0, "max_staleness": None}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._reader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._reader.load_state_dict(state_dict)


def in_place(
    rows: list[Experience], *, norm: LossNorm, updates: int, ranks: int, seed: Sequence[int]
) -> list[Experience]:
    """The rows where Trinity's trainer expects those of each update, with their weights in it; in between, copies of
    the shortest that train nothing."""
    layout = lay_out(
        [
            BatchRow(row.info[ROW].rsplit("_", 1)[0], len(row.tokens), int(torch.count_nonzero(row.returns)))
            for row in rows
        ],
        norm=norm,
        updates=updates,
        ranks=ranks,
        multiple=1,
        seed=seed,
    )
    for row, scale in zip(rows, layout.scales, strict=True):
        row.returns = row.returns * scale
    shortest = min(rows, key=lambda row: len(row.tokens))
    placed = [_blank(shortest) if index is None else rows[index] for index in layout.order]
    for row in placed:
        row.info[UPDATES] = len(placed) // layout.size
    return placed


def _blank(like: Experience) -> Experience:
    blank = deepcopy(like)
    blank.action_mask = torch.zeros_like(like.action_mask)
    blank.advantages = torch.zeros_like(like.advantages)
    blank.returns = torch.zeros_like(like.returns)
    blank.info |= {SEGMENTS: [], VERSIONS: []}
    return blank
