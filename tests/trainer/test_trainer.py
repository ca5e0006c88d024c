"""Updates: what they train, how they are split, what they report, and which models they fall back for."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from models import VOCAB, small_model
from trees import random_batch

from ajet.credit.weights import CallCredit, EpisodeCredit
from ajet.schema.call_tree import CallTree
from ajet.trainer.loss import LossSettings, PolicyLoss
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout, items_of, make_packs
from ajet.trainer.planner import CostModel, check_trees, plan, tree_support
from ajet.trainer.trainer import Trainer, TrainSettings

Batch = list[tuple[CallTree, EpisodeCredit]]


def a_batch(seed: int = 0, **options: Any) -> Batch:
    episodes, _, credit = random_batch(seed, vocab=VOCAB, groups=3, repeat=3, **options)
    return [(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


OPTIM = OptimSettings(lr=1e-2, weight_decay=0.0)


def test_an_update_moves_probability_towards_rewarded_tokens() -> None:
    model = small_model()
    batch = a_batch()
    trainer = Trainer(model, TrainSettings(LossSettings(correction_cap=None), OPTIM))
    before = trainer.logprobs(batch)
    metrics = trainer.update(batch)
    after = trainer.logprobs(batch)
    moved = sum(
        float((after[key] - before[key]).sum()) * batch[key[0]][1].calls[key[1]].entries[0][0] for key in before
    )
    assert moved > 0
    assert metrics["train/updates"] == 1
    assert metrics["tokens/trained"] == sum(len(values) for values in before.values())
    assert metrics["loss/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss/clip_fraction"] == 0.0


def test_a_token_budget_changes_nothing_but_the_number_of_packs() -> None:
    batch = a_batch(1)
    results = []
    for budget in (None, 50):
        model = small_model()
        trainer = Trainer(model, TrainSettings(optim=OptimSettings(lr=1e-3), max_tokens=budget))
        metrics = trainer.update(batch)
        results.append((weights(model), metrics))
    (one, whole), (other, split) = results
    assert split["tokens/packs"] > whole["tokens/packs"] == 1
    assert split["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-4)
    assert split["loss/total"] == pytest.approx(whole["loss/total"], rel=1e-4, abs=1e-6)
    assert gap(one, other) < 1e-3  # Adam turns rounding of near-zero gradients into steps of up to lr


@pytest.mark.parametrize("loss", [PolicyLoss.PPO, PolicyLoss.GSPO])
def test_mini_batches_use_old_logprobs_and_keep_the_scale(loss: PolicyLoss) -> None:
    model = small_model()
    trainer = Trainer(
        model, TrainSettings(LossSettings(loss, correction_cap=None), OPTIM, mini_batches=3, max_tokens=60)
    )
    metrics = trainer.update(a_batch(2))
    assert metrics["train/updates"] == 3 == trainer.updates
    assert metrics["loss/ratio_max"] != pytest.approx(1.0, abs=1e-6)


def test_kl_pulls_towards_the_reference() -> None:
    reference = small_model(seed=1)
    model = small_model()
    batch = a_batch(3)
    for _, credit in batch:
        for call in credit.calls:
            call.entries = [(0.0, weight) for _, weight in call.entries]
    trainer = Trainer(model, TrainSettings(LossSettings(kl_coef=1.0), OPTIM), reference=reference)
    kls = [trainer.update(batch)["loss/kl"] for _ in range(8)]
    assert kls[-1] < kls[0]


def test_a_kl_term_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        Trainer(small_model(), TrainSettings(LossSettings(kl_coef=0.1)))


def test_a_batch_without_anything_to_train_changes_nothing() -> None:
    model = small_model()
    batch = [(tree, EpisodeCredit(c.episode_id, [CallCredit() for _ in c.calls])) for tree, c in a_batch()]
    before = weights(model)
    trainer = Trainer(model, TrainSettings(optim=OPTIM))
    assert trainer.update(batch) == {"train/updates": 0.0, "tokens/trained": 0.0}
    assert gap(before, weights(model)) == 0.0
    assert trainer.updates == 0


def test_a_gradient_that_is_not_finite_is_not_applied(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    batch = a_batch()
    trainer = Trainer(model, TrainSettings(LossSettings(correction_cap=None), OPTIM))
    trainer.logprobs(batch)
    for _, credit in batch:
        for call in credit.calls:
            call.entries = [(float("nan"), weight) for _, weight in call.entries]
    before = weights(model)
    assert trainer.update(batch)["train/updates"] == 0
    assert gap(before, weights(model)) == 0.0
    assert "not finite" in caplog.text


def test_gradient_checkpointing_gives_the_same_update() -> None:
    batch = a_batch(4)
    found = []
    for checkpointing in (False, True):
        model = small_model()
        Trainer(model, TrainSettings(optim=OPTIM, gradient_checkpointing=checkpointing)).update(batch)
        found.append(weights(model))
    assert gap(*found) < 1e-6


def test_half_precision_keeps_its_true_weights_in_float32() -> None:
    model = small_model().to(torch.bfloat16)
    trainer = Trainer(model, TrainSettings(optim=OptimSettings(lr=1e-6, weight_decay=0.0)))
    before = weights(model)
    masters = {name: t.clone() for name, t in trainer.optimizer.tensors().items() if name.endswith("|master")}
    trainer.update(a_batch(5))
    assert gap(before, weights(model)) < 1e-3
    moved = [name for name, old in masters.items() if not torch.equal(old, trainer.optimizer.tensors()[name])]
    assert len(moved) == len(masters)  # a step far below bfloat16's resolution is not lost


def test_learning_rate_schedules() -> None:
    linear = OptimSettings(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6)
    assert [linear.lr_at(step) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = OptimSettings(lr=1.0, schedule="cosine", total_steps=4)
    assert [cosine.lr_at(step) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    assert OptimSettings(lr=0.3).lr_at(10**6) == 0.3


# ------------------------------------------------------------------------------------------- which models, which layout


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "gemma"])
def test_ordinary_families_train_trees(family: str) -> None:
    options = {"sliding_window": None} if family == "mistral" else {}
    model = small_model(family, **options)
    assert tree_support(model) is None
    assert check_trees(model, items_of(a_batch())) is None


def test_a_short_sliding_window_trains_rows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("mistral", sliding_window=4)
    trainer = Trainer(model, TrainSettings(optim=OPTIM))
    with caplog.at_level(logging.WARNING, "ajet.trainer"):
        assert trainer.update(a_batch())["train/updates"] == 1
        trainer.update(a_batch())
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
    assert trainer.update(a_batch(6))["train/updates"] == 1
    assert "training in rows" in caplog.text and "differ" in caplog.text


def test_rows_and_trees_update_alike() -> None:
    batch = a_batch(7)
    tree_model = small_model()
    row_model = copy.deepcopy(tree_model)
    tree = Trainer(tree_model, TrainSettings(optim=OptimSettings(lr=1e-3)))
    rows = Trainer(row_model, TrainSettings(optim=OptimSettings(lr=1e-3)))
    from ajet.trainer.forward import RowForward

    rows._forward = RowForward(budget=100)
    assert tree.update(batch)["train/grad_norm"] == pytest.approx(rows.update(batch)["train/grad_norm"], rel=1e-5)


def test_the_planner_shares_where_it_pays() -> None:
    costs = CostModel(token=1e6, pair=1.0, block=1e4)
    items = items_of(a_batch(8))
    assert plan(items, costs, None)[0].layout is Layout.TREE
    assert plan(items, CostModel(token=1.0, pair=1.0, block=1e9), None)[0].layout is Layout.MERGED
    assert plan(items, costs, None, trees=False)[0].layout is Layout.MERGED
    assert costs.estimate(make_packs(items)) < costs.estimate(make_packs(items, Layout.FLAT))


def test_lora_trains_adapters_and_its_base_is_the_reference() -> None:
    peft = pytest.importorskip("peft")
    base = small_model()
    frozen = weights(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Trainer(model, TrainSettings(LossSettings(kl_coef=0.1), OPTIM))
    batch = a_batch(9)
    first = trainer.update(batch)
    second = trainer.update(batch)
    assert first["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["loss/kl"] > 0.0
    left = {name.replace("base_model.model.", "").replace(".base_layer", ""): p for name, p in weights(model).items()}
    assert all(torch.equal(left[name], value) for name, value in frozen.items())


def test_updates_repeat_bit_for_bit() -> None:
    found = []
    for _ in range(2):
        model = small_model()
        trainer = Trainer(model, TrainSettings(optim=OPTIM, mini_batches=2))
        for seed in range(3):
            trainer.update(a_batch(seed))
        found.append(weights(model))
    assert gap(*found) == 0.0


def test_logprobs_are_those_of_the_models_own_forward() -> None:
    model = small_model()
    batch = a_batch(10)
    known = Trainer(model, TrainSettings(optim=OPTIM)).logprobs(batch)
    for (episode, index), values in known.items():
        tree = batch[episode][0]
        call = tree.calls[index]
        reply = tree.runs[call.run].ids
        ids = torch.tensor(np.concatenate([tree.prompt_ids(index), reply]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, call.prompt_tokens - 1 : -1] / (call.sampling.temperature or 1.0)
        expected = logits.log_softmax(-1)[torch.arange(len(reply)), torch.from_numpy(reply.astype(np.int64))]
        assert values == pytest.approx(expected.numpy()[call.mask], abs=1e-5)
