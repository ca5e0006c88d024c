"""The CPU's block attention against a dense mask: the same forest, heads shared, every number format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ajet.engine.attention_rules import Rule
from ajet.trainer import attention, block_attention
from ajet.trainer.attention import plan_attention
from ajet.trainer.pack import Layout, Pack, items_of, make_packs
from support.random_batches import random_batch

QUERY_HEADS, KEY_HEADS, SIZE = 4, 2, 8


def forest(seed: int) -> Pack:
    episodes, _, credit = random_batch(seed)
    items = items_of([(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)])
    (pack,) = make_packs(items, Layout.TREE)
    return pack


def attended(pack: Pack, dtype: torch.dtype, layout: str) -> list[Tensor]:
    """Output and gradients of query, key and value, computed as the model's layers call it."""
    generator = torch.Generator().manual_seed(5)
    tensors = []
    for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS):
        if layout == "tokens first":  # what projections give
            drawn = torch.randn(1, len(pack), heads, SIZE, generator=generator, dtype=torch.float64).transpose(1, 2)
        else:
            drawn = torch.randn(1, len(pack), heads, SIZE, generator=generator, dtype=torch.float64)
            drawn = drawn.transpose(1, 2).contiguous()
        tensors.append(drawn.to(dtype).requires_grad_(True))
    plan = plan_attention(pack, torch.device("cpu"))
    output, _ = attention._attention(torch.nn.Identity(), *tensors, None, ajet_plan=plan)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    (output * weights).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]


@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]
)
def test_blocks_give_what_a_dense_mask_gives(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, layout: str
) -> None:
    batches = 0
    for seed in range(6):
        pack = forest(seed)
        batches += len(plan_attention(pack, torch.device("cpu")).calls_for(Rule()).batches)
        blocks = attended(pack, dtype, layout)
        with monkeypatch.context() as without:
            without.setattr(attention, "uses_blocks", lambda key, value: False)
            dense = attended(pack, torch.float64 if dtype is torch.float64 else torch.float32, layout)
        assert len(blocks) == len(dense) == 4
        for ours, theirs in zip(blocks, dense, strict=True):
            assert ours.dtype is dtype
            assert float((ours.to(theirs.dtype) - theirs).abs().max() / theirs.abs().max()) <= tolerance
    assert batches, "no forest had small rows to run as one"


def test_rows_return_to_their_places_and_padding_has_no_gradient() -> None:
    batch = block_attention.RowBatch.of([(0, 3), (5, 10)], torch.device("cpu"))
    whole = torch.arange(10.0).view(10, 1, 1) + 1
    rows = batch.take(whole)
    assert rows[:, 0, :, 0].tolist() == [[1, 2, 3, 3, 3], [6, 7, 8, 9, 10]]
    assert batch.take_gradient(whole)[:, 0, :, 0].tolist() == [[1, 2, 3, 0, 0], [6, 7, 8, 9, 10]]
    back = torch.zeros_like(whole)
    batch.put(back, rows)
    assert back.flatten().tolist() == [1, 2, 3, 0, 0, 6, 7, 8, 9, 10]
