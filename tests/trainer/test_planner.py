"""How a batch is laid out: shared where that pays."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from ajet.trainer.executor import CostModel, plan
from ajet.trainer.pack import Layout, items_of, make_packs
from support.random_batches import credited_batch

BOTH = [Layout.TREE, Layout.MERGED]


def test_the_planner_shares_where_it_pays() -> None:
    costs = CostModel(token=1e6, pair=1.0, block=1e4)
    items = items_of(credited_batch(8))
    assert plan(items, costs, None, BOTH)[0].layout is Layout.TREE
    assert plan(items, CostModel(token=1.0, pair=1.0, block=1e9), None, BOTH)[0].layout is Layout.MERGED
    assert plan(items, costs, None, [Layout.MERGED])[0].layout is Layout.MERGED
    assert costs.estimate(make_packs(items)) < costs.estimate(make_packs(items, Layout.FLAT))


def test_where_no_layer_attends_pairs_cost_nothing() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    costs = CostModel.of(AutoModelForCausalLM.from_config(config))
    assert costs.pair == 0.0 and costs.token > 0
