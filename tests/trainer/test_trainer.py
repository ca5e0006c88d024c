"""Updates: what they train, how they are split, what they report."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from ajet.schema.chat import Sampling
from ajet.trainer import loss as losses
from ajet.trainer import trainer as trainer_module
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit, LossNorm
from ajet.trainer.executor import Chosen
from ajet.trainer.forward import RowForward
from ajet.trainer.loss import AdaptiveKL, Correction, CorrectionMode, Level, LossSettings, PolicyLoss
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.pack import Layout, items_of
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import credited_batch
from support.small_models import gap, small_model, weights

OPTIM = OptimSettings(lr=1e-2, weight_decay=0.0)
MASKED_SEQUENCES = Correction(CorrectionMode.MASKED, level=Level.SEQUENCE, low=0.0, high=1e9)


def test_an_update_moves_probability_towards_rewarded_tokens() -> None:
    model = small_model()
    batch = credited_batch()
    trainer = Updater(model, TrainSettings(LossSettings(correction=None), OPTIM))
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
    batch = credited_batch(1)
    results = []
    for budget in (None, 50):
        model = small_model()
        trainer = Updater(model, TrainSettings(optim=OptimSettings(lr=1e-3), max_tokens=budget))
        metrics = trainer.update(batch)
        results.append((weights(model), metrics))
    (one, whole), (other, split) = results
    assert split["tokens/packs"] > whole["tokens/packs"] == 1
    assert split["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-4)
    assert split["loss/total"] == pytest.approx(whole["loss/total"], rel=1e-4, abs=1e-6)
    assert gap(one, other) < 1e-3  # Adam turns rounding of near-zero gradients into steps of up to lr


@pytest.mark.parametrize("loss", [losses.PPO, losses.GSPO])
def test_mini_batches_use_old_logprobs_and_keep_the_scale(loss: PolicyLoss) -> None:
    model = small_model()
    trainer = Updater(model, TrainSettings(LossSettings(loss, correction=None), OPTIM, mini_batches=3, max_tokens=60))
    metrics = trainer.update(credited_batch(2))
    assert metrics["train/updates"] == 3 == trainer.updates
    assert metrics["loss/ratio_max"] != pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("norm", list(LossNorm))
def test_a_mini_batch_weighs_its_episodes_as_a_batch_of_its_own(norm: LossNorm) -> None:
    batch = credited_batch(2)
    trees = dict(enumerate(tree for tree, _ in batch))
    trainer = Updater(small_model(), TrainSettings(mini_batches=3))
    tokens = {index: tree.trained_tokens for index, tree in trees.items()}
    weight = {
        LossNorm.TOKEN_MEAN: lambda part, _: 1 / sum(tokens[e] for e in part),
        LossNorm.SEQUENCE_MEAN: lambda part, e: 1 / (len(part) * tokens[e]),
        LossNorm.DR_GRPO: lambda part, _: 1 / (len(part) * 50),
    }[norm]
    given = [
        (tree, EpisodeCredit(c.episode_id, [CallCredit([(1.0, weight(list(trees), e))]) for _ in c.calls]))
        for e, (tree, c) in enumerate(batch)
    ]
    parts = trainer._mini_batches(items_of(given), norm)
    assert len(parts) == 3
    for part in parts:
        chosen = sorted({item.episode for item in part})
        for item in part:
            assert item.entries[0][1] == pytest.approx(weight(chosen, item.episode))


def test_kl_pulls_towards_the_reference() -> None:
    reference = small_model(seed=1)
    model = small_model()
    batch = credited_batch(3)
    for _, credit in batch:
        for call in credit.calls:
            call.entries = [(0.0, weight) for _, weight in call.entries]
    trainer = Updater(model, TrainSettings(LossSettings(kl_coef=1.0), OPTIM), reference=reference)
    kls = [trainer.update(batch)["loss/kl"] for _ in range(8)]
    assert kls[-1] < kls[0]


def test_a_masked_episode_drifts_like_any_other() -> None:
    """It counts in its group's baseline, so `use_kl_in_reward` is taken off its calls, too."""
    trees = [tree for tree, _ in credited_batch(4)]
    for call in trees[0].calls:
        call.mask = np.ones_like(call.mask)
    trainer = Updater(small_model(), TrainSettings(optim=OPTIM), reference=small_model(seed=7))
    expected = trainer.drift(trees)
    for call in trees[0].calls:
        call.mask, call.drop = np.zeros_like(call.mask), "failure_reward"
    assert trainer.drift(trees) == pytest.approx(expected, abs=1e-4)
    trees[0].calls[0].drop = "not_trainable"
    assert trainer.drift(trees).keys() == expected.keys() - {(0, 0)}


def test_a_kl_term_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        Updater(small_model(), TrainSettings(LossSettings(kl_coef=0.1)))


def test_a_batch_without_anything_to_train_changes_nothing() -> None:
    model = small_model()
    batch = [(tree, EpisodeCredit(c.episode_id, [CallCredit() for _ in c.calls])) for tree, c in credited_batch()]
    before = weights(model)
    trainer = Updater(model, TrainSettings(optim=OPTIM))
    assert trainer.update(batch) == {"train/updates": 0.0, "tokens/trained": 0.0}
    assert gap(before, weights(model)) == 0.0
    assert trainer.updates == 0


def test_a_gradient_that_is_not_finite_is_not_applied(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    batch = credited_batch()
    trainer = Updater(model, TrainSettings(LossSettings(correction=None), OPTIM))
    trainer.logprobs(batch)
    for _, credit in batch:
        for call in credit.calls:
            call.entries = [(float("nan"), weight) for _, weight in call.entries]
    before = weights(model)
    assert trainer.update(batch)["train/updates"] == 0
    assert gap(before, weights(model)) == 0.0
    assert "not finite" in caplog.text and "lower ajet.trainer_common.optim.lr (now" in caplog.text


DROPPING = {
    "qwen2": {},
    "starcoder2": {"embedding_dropout": 0.5},
    "opt": {"dropout": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},
}
"""Models whose own code drops something in training mode, in a layer or around the layers."""


@pytest.mark.parametrize("family", DROPPING)
def test_gradient_checkpointing_gives_the_same_update(family: str) -> None:
    batch = credited_batch(4)
    found = []
    for checkpointing in (False, True):
        model = small_model(family, **DROPPING[family])
        Updater(model, TrainSettings(optim=OPTIM, gradient_checkpointing=checkpointing)).update(batch)
        found.append(weights(model))
    assert gap(*found) < 1e-6


def test_rows_and_trees_update_alike() -> None:
    batch = credited_batch(7)
    tree_model = small_model()
    row_model = copy.deepcopy(tree_model)
    tree = Updater(tree_model, TrainSettings(optim=OptimSettings(lr=1e-3)))
    rows = Updater(row_model, TrainSettings(optim=OptimSettings(lr=1e-3)))
    rows._chosen = Chosen(RowForward(budget=100), (Layout.MERGED,))
    assert tree.update(batch)["train/grad_norm"] == pytest.approx(rows.update(batch)["train/grad_norm"], rel=1e-5)


def test_lora_trains_adapters_and_its_base_is_the_reference() -> None:
    peft = pytest.importorskip("peft")
    base = small_model()
    frozen = weights(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = Updater(model, TrainSettings(LossSettings(kl_coef=0.1), OPTIM))
    batch = credited_batch(9)
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
        trainer = Updater(model, TrainSettings(optim=OPTIM, mini_batches=2))
        for seed in range(3):
            trainer.update(credited_batch(seed))
        found.append(weights(model))
    assert gap(*found) == 0.0


def test_logprobs_are_those_of_the_models_own_forward() -> None:
    model = small_model()
    batch = credited_batch(10)
    known = Updater(model, TrainSettings(optim=OPTIM)).logprobs(batch)
    for (episode, index), values in known.items():
        tree = batch[episode][0]
        call = tree.calls[index]
        reply = tree.runs[call.run].ids
        ids = torch.tensor(np.concatenate([tree.prompt_ids(index), reply]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, call.prompt_tokens - 1 : -1] / (call.sampling.temperature or 1.0)
        expected = logits.log_softmax(-1)[torch.arange(len(reply)), torch.from_numpy(reply.astype(np.int64))]
        assert values == pytest.approx(expected.numpy()[call.mask], abs=1e-5)


def test_every_pass_over_a_batch_is_compared_with_the_policy_before_the_first() -> None:
    batch = credited_batch(2)
    model = small_model()
    trainer = Updater(model, TrainSettings(LossSettings(correction=None), OPTIM, epochs=3))
    before = trainer.logprobs(batch)
    metrics = trainer.update(batch)
    assert metrics["train/updates"] == 3 == trainer.updates
    assert trainer.steps == 1
    assert metrics["loss/ratio_max"] > 1.001
    assert all(np.array_equal(trainer.before[key], values) for key, values in before.items())


def recorded_by(model: Any, batch: Any, off: float = 0.0) -> Any:
    """The batch as this model would have sampled it, give or take `off`."""
    batch = copy.deepcopy(batch)
    for (episode, call), values in Updater(model, TrainSettings()).logprobs(batch).items():
        tree_call = batch[episode][0].calls[call]
        tree_call.logprobs = tree_call.logprobs.copy()
        tree_call.logprobs[tree_call.mask] = values + off
    return batch


@pytest.mark.parametrize("loss", [losses.PPO, losses.GSPO])
def test_the_samplers_own_logprobs_save_a_pass_and_change_nothing(
    loss: PolicyLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainSettings(LossSettings(loss), OptimSettings(lr=1e-3), mini_batches=3, epochs=2, max_tokens=60)
    batches = [credited_batch(2), credited_batch(3)]
    measured = trainer_module.logprobs_of
    found = []
    for sampled_by_this in (False, True):
        model, passes = small_model(), [0]
        trainer = Updater(model, settings)

        def counted(*given: Any, passes: list[int] = passes) -> Any:
            passes[0] += 1
            return measured(*given)

        for batch in batches:
            recorded = recorded_by(model, batch)
            with monkeypatch.context() as patch:
                patch.setattr(trainer_module, "logprobs_of", counted)
                trainer.update(recorded, sampled_by_this=sampled_by_this)
        found.append((weights(model), passes[0]))
    (plain, every), (saved, once) = found
    assert (every, once) == (2, 1), "the first batch is compared, and only the first"
    assert gap(plain, saved) < 1e-5


def test_a_sampler_that_differs_does_not_replace_the_pass() -> None:
    settings = TrainSettings(LossSettings(correction=None), OPTIM, mini_batches=3)
    found = []
    for sampled_by_this in (False, True):
        model = small_model()
        trainer = Updater(model, settings)
        for seed in (2, 3):
            trainer.update(recorded_by(model, credited_batch(seed), off=0.1), sampled_by_this=sampled_by_this)
        found.append(weights(model))
    assert gap(*found) == 0.0


def test_passes_multiply_with_mini_batches() -> None:
    trainer = Updater(small_model(), TrainSettings(LossSettings(), OPTIM, mini_batches=2, epochs=2))
    assert trainer.update(credited_batch(2))["train/updates"] == 4


@pytest.mark.parametrize("correction", [Correction(CorrectionMode.SEQUENCE_TIS), MASKED_SEQUENCES])
def test_corrections_by_trajectory_see_all_packs(correction: Correction) -> None:
    batch = credited_batch(1)
    norms = []
    for budget in (None, 50):
        trainer = Updater(small_model(), TrainSettings(LossSettings(correction=correction), OPTIM, max_tokens=budget))
        norms.append(trainer.update(batch)["train/grad_norm"])
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_the_reference_follows_every_few_steps() -> None:
    reference, model = small_model(seed=1), small_model()
    trainer = Updater(model, TrainSettings(LossSettings(kl_coef=0.1), OPTIM, reference_sync=2), reference=reference)
    start = weights(reference)
    trainer.update(credited_batch(0))
    assert gap(start, weights(reference)) == 0.0
    trainer.update(credited_batch(1))
    assert gap(weights(model), weights(reference)) == 0.0
    assert trainer.update(credited_batch(2))["loss/kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_kl_coefficient_follows_its_target() -> None:
    found = {}
    for target in (1e-6, 1e3):
        settings = TrainSettings(LossSettings(kl_coef=0.1), OPTIM, kl_adaptive=AdaptiveKL(target))
        trainer = Updater(small_model(), settings, reference=small_model(seed=1))
        found[target] = [trainer.update(credited_batch(step))["train/kl_coef"] for step in range(3)]
    assert found[1e-6] == pytest.approx([0.1, 0.1 * 1.02, 0.1 * 1.02**2])
    assert found[1e3] == pytest.approx([0.1, 0.1 * 0.98, 0.1 * 0.98**2])


def lora(dropout: float) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    torch.manual_seed(3)
    model = peft.get_peft_model(small_model(), config)
    with torch.no_grad():  # new adapters change nothing, and so would their dropout
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return model


def test_the_dropout_of_adapters_acts_on_the_gradient_alone() -> None:
    batch = credited_batch(4)
    norms = {}
    for dropout in (0.0, 0.5):
        model = lora(dropout)
        trainer = Updater(model, TrainSettings(LossSettings(correction=None), OPTIM))
        before = trainer.logprobs(batch)
        metrics = trainer.update(batch)
        norms[dropout] = metrics["train/grad_norm"]
        assert all(np.array_equal(trainer.before[key], values) for key, values in before.items()) or not dropout
        assert metrics["loss/ratio_max"] > 1.001 or not dropout
        assert not any(module.training for module in model.modules())
    assert norms[0.5] != pytest.approx(norms[0.0], rel=1e-3)


def test_a_temperature_near_zero_is_trained_as_it_was_recorded() -> None:
    """Greedy replies carry the logprobs of temperature 1, whatever small number was asked for."""
    batch = credited_batch(10)
    known = {}
    for temperature in (0.0, 1e-6, 1.0):
        for tree, _ in batch:
            for call in tree.calls:
                call.sampling = Sampling(temperature=temperature)
        known[temperature] = Updater(small_model(), TrainSettings(optim=OPTIM)).logprobs(batch)
    for key, values in known[1.0].items():
        assert np.array_equal(values, known[0.0][key])
        assert np.array_equal(values, known[1e-6][key])
