"""Which models train trees, that those which can't are found out and train rows, and that both share where it pays."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ajet.engine.attention_rules import fix_longrope
from ajet.schema.episode import ROOT, Call, CallTree, Run
from ajet.trainer import attention, executor
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit
from ajet.trainer.executor import CostModel, check_trees, plan, tree_support
from ajet.trainer.footprint import LiveBytes
from ajet.trainer.forward import RowForward
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout, items_of, make_packs
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import credited_batch
from support.small_models import VOCAB, small_model
from support.windowed_models import windowed_model

OPTIM = OptimSettings(lr=1e-2, weight_decay=0.0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "gemma"])
def test_ordinary_families_train_trees(family: str) -> None:
    options = {"sliding_window": None} if family == "mistral" else {}
    model = small_model(family, **options)
    assert tree_support(model) is None
    assert check_trees(model, items_of(credited_batch())) is None


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_the_length_trains_rows_and_says_so(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= LONGROPE
    model = small_model("llama", rope_parameters=rope)
    trainer = Updater(model, TrainSettings(optim=OPTIM))
    with caplog.at_level(logging.WARNING, "ajet.trainer"):
        assert trainer.update(credited_batch())["train/updates"] == 1
        trainer.update(credited_batch())
    assert caplog.text.count(f"({kind}) depends on the length") == 1


def test_recurrent_layers_train_rows(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert "state from token to token" in str(tree_support(model))


def test_why_a_model_trains_rows_is_said_in_its_own_words() -> None:
    items = items_of(credited_batch(2))
    reads = check_trees(small_model("doge", pad_token_id=0), items)
    assert str(reads).startswith("DogeAttention (model.layers.0.self_attn): ") and "no attribute 'dtype'" in str(reads)
    indexes = str(check_trees(small_model("deepseek_v32", pad_token_id=0), items))
    assert "DeepseekV32Attention (model.layers.0.self_attn)" in indexes and "something else with its mask" in indexes
    model = small_model()
    inner = model.model.layers[1].self_attn.forward

    def narrow(hidden_states: Any, position_embeddings: Any, attention_mask: Any, past_key_values: Any = None) -> Any:
        return inner(hidden_states, position_embeddings, attention_mask, past_key_values)

    model.model.layers[1].self_attn.forward = narrow
    narrow_says = str(check_trees(model, items))
    assert narrow_says.startswith("Qwen2Attention (model.layers.1.self_attn): ") and "unexpected keyword" in narrow_says


def test_a_model_that_names_the_mask_in_its_call_trains_trees() -> None:
    model = small_model("afmoe", pad_token_id=0)
    assert tree_support(model) is None and check_trees(model, items_of(credited_batch(2))) is None


def test_a_model_that_ignores_the_layout_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """The safety net: a model whose attention passes the check of its configuration and is wrong all the same."""
    model = small_model()
    inner = model.model.layers[0].self_attn.forward

    def leaky(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, attention = inner(hidden_states, *args, **kwargs)
        return output + 0.1 * hidden_states.cumsum(1), attention  # mixes in every earlier token of the pack

    model.model.layers[0].self_attn.forward = leaky
    trainer = Updater(model, TrainSettings(optim=OPTIM))
    assert trainer.update(credited_batch(6))["train/updates"] == 1
    assert "training in rows" in caplog.text and "differ" in caplog.text


def test_routing_that_flips_for_a_rounding_error_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision a token of a mixture of experts may go elsewhere; in float32 it goes the same way."""
    model = windowed_model("mixtral", num_local_experts=16, num_experts_per_tok=1, initializer_range=0.3)
    model = model.to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    items = items_of(credited_batch(3))
    assert "differ" in str(executor._difference(model, items, *executor.TREE_AND_ROWS, gradients=True))
    assert check_trees(model, items) is None
    after = model.state_dict()
    assert all(after[name].dtype is torch.bfloat16 and torch.equal(after[name], before[name]) for name in before)
    monkeypatch.setattr(attention, "visibility_of", lambda mask: mask._replace(size=mask.size + 1))
    assert "differ" in str(check_trees(model, items))


def test_rows_whose_rotary_embedding_depends_on_the_length_are_computed_one_by_one() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **LONGROPE}
    model = small_model("llama", rope_parameters=rope)
    (pack,) = make_packs(items_of(credited_batch(3)), Layout.FLAT)
    lengths = [end - start for start, end in pack.rows]
    assert min(lengths) < 16 < max(lengths)
    with torch.no_grad():
        together = RowForward()(model, pack).logprob_E
        alone = RowForward(budget=1)(model, pack).logprob_E
    assert torch.equal(together, alone)


def crossing_batch() -> Any:
    """An episode of five calls, each of which continues the one before, and whose lengths cross 16 on the way."""
    rng = np.random.default_rng(0)
    tree = CallTree([Run(rng.integers(0, VOCAB, 4).astype(np.int32), ROOT, 0)])
    for index in range(5):
        end = tree.runs[-1].start + len(tree.runs[-1].ids)
        tree.runs.append(Run(rng.integers(0, VOCAB, 6).astype(np.int32), len(tree.runs) - 1, end, call=index))
        mask, nothing = np.ones(6, np.bool_), np.zeros(6, np.float32)
        tree.calls.append(Call(f"c{index}", "a", "t", index, index, end, index + 1, nothing, mask))
    return [(tree, EpisodeCredit("e", [CallCredit([(1.0, 1.0)])] * 5))]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_each_call_has_the_rotary_embedding_of_its_own_length(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {**LONGROPE, "long_factor": [8.0] * 4}
    model = small_model("llama", rope_parameters=rope, max_position_embeddings=16)
    trainer = Updater(model, TrainSettings(optim=OPTIM, max_tokens=64))
    batch = crossing_batch()
    for _ in range(2):  # in the second pass, the longest row was computed before
        found = trainer.logprobs(batch)
        tree = batch[0][0]
        for index, call in enumerate(tree.calls):
            ids = torch.from_numpy(tree.path_ids(call.run).astype(np.int64))[None]
            fresh = small_model("llama", rope_parameters=rope, max_position_embeddings=16)
            with torch.no_grad():
                shares = fresh(input_ids=ids[:, :-1]).logits.log_softmax(-1)
            expected = shares.gather(2, ids[:, 1:, None])[0, call.prompt_tokens - 1 :, 0]
            assert np.abs(found[0, index] - expected.numpy()).max() < 1e-5


def test_longrope_is_fixed_to_the_factors_of_one_length() -> None:
    """As vLLM computes: with a long `max_model_len`, short rows have the long factors, too, and trees can be shared."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **LONGROPE, "long_factor": [8.0] * 4}
    ids = torch.arange(24)[None] % VOCAB
    plain, long, short = (small_model("llama", rope_parameters=rope) for _ in range(3))
    fix_longrope(long, 17)
    fix_longrope(short, 16)
    with torch.no_grad():
        row = plain(input_ids=ids).logits
        assert torch.equal(long(input_ids=ids).logits, row)
        assert torch.allclose(long(input_ids=ids[:, :8]).logits, row[:, :8], atol=1e-5)
        assert torch.equal(short(input_ids=ids[:, :8]).logits, plain(input_ids=ids[:, :8]).logits)
        assert not torch.allclose(plain(input_ids=ids[:, :8]).logits, row[:, :8], atol=1e-2)
    assert tree_support(plain) is not None
    assert tree_support(long) is None and check_trees(long, items_of(credited_batch(3))) is None


def test_the_comparison_holds_two_gradients_in_their_own_format() -> None:
    """And one of them in main memory: trainers that keep copies and moments there have no room for more on a GPU."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.05}
    model = small_model(**sizes).to(torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with LiveBytes([*model.parameters(), *model.buffers()]) as counter:
        assert check_trees(model, items_of(credited_batch(groups=1, repeat=2))) is None
    assert 2 * size < max(counter.peaks.values()) < 4.5 * size


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
