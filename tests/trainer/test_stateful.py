"""Models that keep a state from token to token: padding and other rows don't reach a row's state, and where trees fork,
each branch goes on from the state there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ajet.backbone.local.learner import linear_modules
from ajet.trainer.attention import ROOT, calls_of, segments_of
from ajet.trainer.executor import tree_support
from ajet.trainer.forward import PackForward, RowForward
from ajet.trainer.pack import Layout, items_of, make_packs
from support.hybrids import STATEFUL, hybrid_model
from support.random_batches import credited_batch
from support.small_models import distance, packed_gradient, recompute_layers

BRANCHING = ["Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next", "OLMo hybrid"]


def gradients(model: Any, forward: RowForward, layout: Layout, budget: int | None = None) -> dict[str, torch.Tensor]:
    return packed_gradient(model, forward, items_of(credited_batch(3, groups=1, repeat=3)), layout, budget)


@pytest.mark.parametrize("family", STATEFUL)
def test_padded_and_merged_rows_have_the_gradient_of_each_row_alone(family: str) -> None:
    model = hybrid_model(family)
    assert (tree_support(model) is None) == (family in BRANCHING)
    alone = gradients(model, RowForward(budget=1), Layout.FLAT)
    for layout in (Layout.FLAT, Layout.MERGED):
        found = gradients(model, RowForward(), layout)
        assert distance(found, alone) < 1e-5


@pytest.mark.parametrize("family", BRANCHING)
def test_branches_that_go_on_from_a_state_have_the_gradient_of_each_row_alone(family: str) -> None:
    model = hybrid_model(family)
    alone = gradients(model, RowForward(budget=1), Layout.FLAT)
    for checkpointing in (False, True):
        if checkpointing:
            recompute_layers(model)
        for budget in (None, 40):  # one pack; several, each with the contexts that it needs
            found = gradients(model, PackForward(), Layout.TREE, budget)
            assert distance(found, alone) < 1e-5


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """transformers computes the gated delta rule in float32, whatever the model's format: here that means float64."""
    convert, default = torch.Tensor.to, torch.get_default_dtype()

    def doubled(dtype: Any) -> Any:
        return torch.float64 if dtype is torch.float32 else dtype

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor,
            "to",
            lambda tensor, *args, **options: convert(
                tensor, *map(doubled, args), **{name: doubled(value) for name, value in options.items()}
            ),
        )
        patch.setattr(torch.Tensor, "float", lambda tensor: convert(tensor, torch.float64))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_branches_differ_from_rows_by_rounding_alone(adapters: bool) -> None:
    """Adapters multiply the rounding: of rows as of trees."""
    model = hybrid_model("Qwen3.5")
    if adapters:
        torch.manual_seed(0)
        targets = linear_modules(model)
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=targets)).eval()
    in_32 = [gradients(model, RowForward(budget=1), Layout.FLAT), gradients(model, PackForward(), Layout.TREE)]
    model.double()
    with everything_in_float64():
        exact = gradients(model, RowForward(budget=1), Layout.FLAT)
        tree = gradients(model, PackForward(), Layout.TREE)

    def off(found: dict[str, torch.Tensor]) -> float:
        differences = torch.stack([(found[name].double() - each).norm() for name, each in exact.items()])
        return float(differences.norm() / torch.stack([each.norm() for each in exact.values()]).norm())

    assert off(tree) < 1e-12
    rows_32, tree_32 = map(off, in_32)
    assert tree_32 < 4 * rows_32


def test_segments_end_where_a_tree_forks() -> None:
    (pack,) = make_packs(items_of(credited_batch(3, groups=2, repeat=3)))
    segments = segments_of(pack.ends)
    assert [token for one in segments for token in range(one.start, one.end)] == list(range(len(pack)))
    for one in segments:
        depth = 0 if one.before == ROOT else pack.positions[segments[one.before].end - 1] + 1
        assert pack.positions[one.start : one.end].tolist() == list(range(depth, depth + one.tokens))
    done: set[int] = {ROOT}
    for call in calls_of(segments):
        assert {segments[index].before for index in call} <= done
        done |= set(call)
    assert len(done) == len(segments) + 1
