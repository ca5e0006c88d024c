"""How a batch is laid out: shared where that pays, in rows for models that can't compute trees."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from random_batches import credited_batch
from small_models import VOCAB, small_model

from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout, items_of, make_packs
from ajet.trainer.planner import CostModel, check_trees, plan, tree_support
from ajet.trainer.trainer import Trainer, TrainSettings

OPTIM = OptimSettings(lr=1e-2, weight_decay=0.0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "gemma"])
def test_ordinary_families_train_trees(family: str) -> None:
    options = {"sliding_window": None} if family == "mistral" else {}
    model = small_model(family, **options)
    assert tree_support(model) is None
    assert check_trees(model, items_of(credited_batch())) is None


def test_a_short_sliding_window_trains_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("mistral", sliding_window=4)
    trainer = Trainer(model, TrainSettings(optim=OPTIM))
    with caplog.at_level(logging.WARNING, "ajet.trainer"):
        assert trainer.update(credited_batch())["train/updates"] == 1
        trainer.update(credited_batch())
    assert caplog.text.count("sliding window") == 1


def test_recurrent_layers_train_rows(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert "state from token to token" in str(tree_support(model))


def test_a_model_that_ignores_the_layout_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """The safety net: a model whose attention passes the check of its configuration and is wrong all the same."""
    model = small_model()
    inner = model.model.layers[0].self_attn.forward

    def leaky(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, attention = inner(hidden_states, *args, **kwargs)
        return output + 0.1 * hidden_states.cumsum(1), attention  # mixes in every earlier token of the pack

    model.model.layers[0].self_attn.forward = leaky
    trainer = Trainer(model, TrainSettings(optim=OPTIM))
    assert trainer.update(credited_batch(6))["train/updates"] == 1
    assert "training in rows" in caplog.text and "differ" in caplog.text


def test_the_planner_shares_where_it_pays() -> None:
    costs = CostModel(token=1e6, pair=1.0, block=1e4)
    items = items_of(credited_batch(8))
    assert plan(items, costs, None)[0].layout is Layout.TREE
    assert plan(items, CostModel(token=1.0, pair=1.0, block=1e9), None)[0].layout is Layout.MERGED
    assert plan(items, costs, None, trees=False)[0].layout is Layout.MERGED
    assert costs.estimate(make_packs(items)) < costs.estimate(make_packs(items, Layout.FLAT))
