"""The GPU's form of attention, as far as a CPU can tell: its masks, scores and sinks, forward and backward.

FlexAttention runs here in eager mode, where it computes the same formulas without its kernels. PyTorch refuses its
backward pass on CPUs for want of a kernel; the formulas are there, so the refusal is switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as library

from ajet.engine.attention_rules import ALL, Rule, Sight, Visibility
from ajet.trainer import attention
from ajet.trainer.attention import AttentionPlan, plan_attention
from ajet.trainer.forward import PackForward
from ajet.trainer.pack import Layout, Pack, items_of, make_packs
from support.random_batches import credited_batch
from support.small_models import distance, packed_gradient, small_model
from support.windowed_models import WINDOWED, windowed_model

VISIBILITIES = [ALL, Visibility(Sight.WINDOW, 7), Visibility(Sight.CHUNK, 6), Visibility(Sight.WINDOW, 10**6)]
FORMATS = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.004}
"""Largest difference, relative to the norm. FlexAttention gives the log-sum-exp in float32, whatever the format."""
HEADS, GROUPS, SIZE = 4, 2, 16


@pytest.fixture
def in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_compiled_flex", lambda: library.flex_attention)
    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None)


def pack_of(seed: int, **size: int) -> Pack:
    (pack,) = make_packs(items_of(credited_batch(seed, **size)), Layout.TREE)
    return pack


def plan_of(pack: Pack) -> AttentionPlan:
    return plan_attention(pack, torch.device("cpu"))


def visibility_name(visibility: Visibility) -> str:
    return f"{visibility.sight}-{visibility.size}"


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=visibility_name)
def test_its_mask_is_the_dense_one(visibility: Visibility) -> None:
    for seed in range(4):
        plan = plan_of(pack_of(seed))
        mask = plan.flex_mask(visibility)
        tokens = len(plan.ends_N)
        shown = library.create_mask(mask.mask_mod, 1, 1, tokens, tokens, device="cpu")[0, 0]
        assert torch.equal(shown, plan.sees(visibility))


@pytest.mark.parametrize("strip", [256, 4096])
@pytest.mark.parametrize("visibility", VISIBILITIES, ids=visibility_name)
def test_the_blocks_that_it_leaves_out_are_empty_and_those_called_full_are(
    visibility: Visibility, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "STRIP", strip)
    pack = pack_of(5, groups=12, repeat=8)
    plan = plan_of(pack)
    mask = plan.flex_mask(visibility)
    sees = plan.sees(visibility)
    step, blocks = mask.BLOCK_SIZE[0], -(-len(pack) // mask.BLOCK_SIZE[0])
    assert blocks > 3
    partial, full = (_listed(mask, name, blocks) for name in ("kv", "full_kv"))
    for row in range(blocks):
        for column in range(blocks):
            part = sees[row * step : (row + 1) * step, column * step : (column + 1) * step]
            whole = part.shape == (step, step) and bool(part.all())
            assert ((row, column) in full) == whole
            assert ((row, column) in partial) == (bool(part.any()) and not whole)


def _listed(mask: Any, kind: str, blocks: int) -> set[tuple[int, int]]:
    counts, indices = getattr(mask, f"{kind}_num_blocks")[0, 0], getattr(mask, f"{kind}_indices")[0, 0]
    return {(row, int(column)) for row in range(blocks) for column in indices[row, : int(counts[row])]}


RULES: dict[str, Callable[[torch.dtype], Rule]] = {
    "plain": lambda dtype: Rule(ALL, 0.25),
    "window": lambda dtype: Rule(Visibility(Sight.WINDOW, 7), 0.25),
    "chunks": lambda dtype: Rule(Visibility(Sight.CHUNK, 6), 0.25),
    "soft cap": lambda dtype: Rule(Visibility(Sight.WINDOW, 7), 0.5, softcap=1.5),
    "sinks": lambda dtype: Rule(ALL, 0.25, sinks_H=torch.linspace(-2, 2, HEADS, dtype=dtype)),
    "cap and sinks": lambda dtype: Rule(Visibility(Sight.CHUNK, 6), 0.5, 1.5, torch.ones(HEADS, dtype=dtype)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", RULES)
def test_it_gives_what_a_dense_mask_gives_forward_and_backward(
    kind: str, dtype: torch.dtype, in_eager_mode: None
) -> None:
    rule = RULES[kind](dtype)
    plan = plan_of(pack_of(2))
    torch.manual_seed(0)
    shapes = [(1, heads, len(plan.ends_N), SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
    weight = torch.randn(1, len(plan.ends_N), HEADS, SIZE, dtype=dtype)

    def run(exact: bool) -> list[Tensor]:
        """Output and gradients; `exact`: by the dense mask, in float64."""
        kept = rule if rule.sinks_H is None else rule._replace(sinks_H=rule.sinks_H.clone().requires_grad_())
        query, key, value = (each.clone().requires_grad_() for each in inputs)
        if exact:
            wide = kept if kept.sinks_H is None else kept._replace(sinks_H=kept.sinks_H.double())
            heads = (each.double() for each in (query, key, value))
            output = attention._dense(*heads, plan.sees(rule.visibility), wide).transpose(1, 2)
        else:
            output = attention._flex(query, key, value, plan, kept)
        (output * weight).sum().backward()
        leaves = [query, key, value, *([] if kept.sinks_H is None else [kept.sinks_H])]
        return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    got, expected = run(exact=False), run(exact=True)
    assert len(got) == len(expected) == 4 + (rule.sinks_H is not None)
    assert got[0].dtype is dtype
    for one, other in zip(got, expected, strict=True):
        assert float((one.double() - other.double()).norm() / other.double().norm()) < FORMATS[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", *WINDOWED])
def test_models_have_the_same_gradient_with_it(
    family: str, in_eager_mode: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"head_dim": SIZE}
    model = windowed_model(family, **options) if family in WINDOWED else small_model(family, **options)
    items = items_of(credited_batch(3, groups=2, repeat=3))
    expected = packed_gradient(model, PackForward(), items, Layout.TREE)
    monkeypatch.setattr(attention, "uses_flex", lambda query: True)
    got = packed_gradient(model, PackForward(), items, Layout.TREE)
    assert distance(got, expected) < 1e-5
