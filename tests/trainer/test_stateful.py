"""Models that keep a state from token to token train in rows: padding and other rows don't reach a row's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ajet.trainer.executor import tree_support
from ajet.trainer.forward import RowForward
from ajet.trainer.pack import Layout, items_of, make_packs
from support.hybrids import STATEFUL, hybrid_model
from support.random_batches import credited_batch


def gradients(model: Any, forward: RowForward, layout: Layout) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    for pack in make_packs(items_of(credited_batch(3, groups=2, repeat=3)), layout):
        logprob_E = forward(model, pack).logprob_E
        (logprob_E * torch.from_numpy(pack.edges.sampler_logprob).float()).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", STATEFUL)
def test_padded_and_merged_rows_have_the_gradient_of_each_row_alone(family: str) -> None:
    model = hybrid_model(family)
    assert "state from token to token" in str(tree_support(model))
    alone = gradients(model, RowForward(budget=1), Layout.FLAT)
    norm = torch.stack([each.norm() for each in alone.values()]).norm()
    for layout in (Layout.FLAT, Layout.MERGED):
        found = gradients(model, RowForward(), layout)
        off = torch.stack([(found[name] - each).norm() for name, each in alone.items()]).norm()
        assert float(off / norm) < 1e-5
