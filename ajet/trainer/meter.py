"""`UpdateMeter`: the metrics of one update, collected while it is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ajet.trainer.pack import Pack


class UpdateMeter:
    """Collects the metrics of one update."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.applied = 0
        self._steps = 0
        self._sums: dict[str, float] = {}

    def add(self, sums: dict[str, Tensor]) -> None:
        """The weighted sums of one pack."""
        for name, value in sums.items():
            number = float(value)
            if name.endswith("/max"):
                self._sums[name] = max(self._sums.get(name, -np.inf), number)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + number

    def step(self, grad_norm: float, applied: bool, lr: float) -> None:
        """One optimiser step."""
        self._steps += 1
        self.applied += applied
        self.values["train/grad_norm"] = grad_norm
        self.values["train/lr"] = lr
        weight = self._sums.get("weight/sum", 0.0) or 1.0
        for name, value in self._sums.items():
            if name == "weight/sum":
                continue
            if name.endswith("/max"):
                self.values[f"loss/{name.removesuffix('/max')}_max"] = value
            elif name == "total/sum":
                self.values["loss/total"] = value / self._steps
            else:
                self.values[f"loss/{name.removesuffix('/sum')}"] = value / weight

    def time(self, name: str, began: float) -> None:
        """Seconds since `began`."""
        self.values[name] = time.perf_counter() - began

    def packs(self, packs: Sequence[Pack]) -> None:
        """Tokens computed, and what flat rows would have cost."""
        add = {
            "tokens/trained": sum(len(pack.edges) for pack in packs),
            "tokens/computed": sum(len(pack) for pack in packs),
            "tokens/as_flat_rows": sum(pack.unshared_tokens for pack in packs),
            "tokens/packs": len(packs),
        }
        if any(pack.experts is not None for pack in packs):
            add["tokens/routed_as_sampled"] = sum(_followed(pack) for pack in packs)
        for name, value in add.items():
            self.values[name] = self.values.get(name, 0.0) + value
        self.values["tokens/packing_ratio"] = self.values["tokens/as_flat_rows"] / self.values["tokens/computed"]


def _followed(pack: Pack) -> int:
    """Tokens whose experts are the sampler's."""
    return 0 if pack.experts is None else int((pack.experts[:, 0, 0] >= 0).sum())
