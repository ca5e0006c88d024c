"""Layers that don't see everything, bent scores and sinks: trees have the gradient of plain rows all the same."""

from __future__ import annotations

import pytest
import torch

from ajet.trainer import attention
from ajet.trainer.attention import UnsupportedAttentionError
from ajet.trainer.executor import check_trees, tree_support
from ajet.trainer.forward import PackForward, RowForward
from ajet.trainer.pack import Item, Layout, items_of
from support.random_batches import credited_batch
from support.small_models import distance, packed_gradient, recompute_layers
from support.windowed_models import WINDOWED, windowed_model


def long_items() -> list[Item]:
    """Paths of several windows, with branches."""
    items = items_of(credited_batch(3, groups=2, repeat=3))
    assert max(item.row_tokens for item in items) > 24
    return items


@pytest.mark.parametrize("family", WINDOWED)
def test_trees_have_the_gradient_of_the_models_own_attention(family: str) -> None:
    model = windowed_model(family)
    items = long_items()
    expected = packed_gradient(model, RowForward(), items, Layout.FLAT)
    assert distance(packed_gradient(model, PackForward(), items, Layout.TREE), expected) < 1e-5
    assert distance(packed_gradient(model, PackForward(), items, Layout.MERGED), expected) < 1e-5
    assert tree_support(model) is None and check_trees(model, items) is None


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("other", ["dense", "short tiles", "checkpointing"])
def test_so_do_the_other_ways_to_compute_them(family: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed_model(family)
    items = long_items()
    expected = packed_gradient(model, RowForward(), items, Layout.FLAT)
    if other == "dense":
        monkeypatch.setattr(attention, "uses_blocks", lambda key, value: False)
    elif other == "short tiles":
        monkeypatch.setattr("ajet.trainer.block_attention.SMALL_ROW", 4)
        monkeypatch.setattr("ajet.trainer.block_attention.TILE", 5)
    else:
        recompute_layers(model)
    assert distance(packed_gradient(model, PackForward(), items, Layout.TREE), expected) < 1e-5


def test_a_mask_for_layers_that_the_model_has_none_of() -> None:
    model = windowed_model("qwen2_moe", use_sliding_window=False, layer_types=None)
    assert model.config.sliding_window == 0
    assert check_trees(model, long_items()) is None


def test_a_window_that_the_first_batch_does_not_reach_is_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of(credited_batch())
    model = windowed_model("mistral", sliding_window=200)
    assert check_trees(model, items) is None
    monkeypatch.setattr(attention, "visibility_of", lambda mask: mask._replace(size=mask.size + 1))
    assert "beyond the window of 200 tokens" in str(check_trees(model, items))


def test_a_model_that_makes_its_masks_itself_is_refused() -> None:
    model = windowed_model("mistral")
    layer = model.model.layers[0]
    inner = layer.forward
    layer.forward = lambda hidden, attention_mask=None, **more: inner(hidden, attention_mask=torch.ones(1), **more)
    assert check_trees(model, long_items()) == (
        "MistralAttention (model.layers.0.self_attn): the model makes its masks itself"
    )
    with pytest.raises(UnsupportedAttentionError):
        packed_gradient(model, PackForward(), long_items(), Layout.TREE)
