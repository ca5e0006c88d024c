"""The optimiser: float32 states whatever the model's dtype, and learning rate schedules."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from ajet.backbone.local.learner import with_adapters
from ajet.config.root import LoraConfig
from ajet.schema.errors import MissingDependencyError
from ajet.trainer import optimizer
from ajet.trainer.optimizer import MasterAdamW, OptimSettings
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import credited_batch
from support.small_models import gap, small_model, weights


def test_half_precision_keeps_its_true_weights_in_float32() -> None:
    model = small_model().to(torch.bfloat16)
    trainer = Updater(model, TrainSettings(optim=OptimSettings(lr=1e-6, weight_decay=0.0)))
    before = weights(model)
    masters = {name: t.clone() for name, t in trainer.optimizer.tensors().items() if name.endswith("|master")}
    trainer.update(credited_batch(5))
    assert gap(before, weights(model)) < 1e-3
    moved = [name for name, old in masters.items() if not torch.equal(old, trainer.optimizer.tensors()[name])]
    assert len(moved) == len(masters)  # a step far below bfloat16's resolution is not lost


def test_learning_rate_schedules() -> None:
    linear = OptimSettings(lr=1.0, warmup_steps=2, schedule="linear", total_steps=6)
    assert [linear.lr_at(step) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = OptimSettings(lr=1.0, schedule="cosine", total_steps=4)
    assert [cosine.lr_at(step) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    floor = OptimSettings(lr=1.0, schedule="cosine", total_steps=4, min_lr_ratio=0.2)
    assert [floor.lr_at(step) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert OptimSettings(lr=0.3).lr_at(10**6) == 0.3


def test_all_updates_of_a_step_have_its_learning_rate() -> None:
    optim = OptimSettings(lr=1.0, warmup_steps=4)
    trainer = Updater(small_model(), TrainSettings(optim=optim, mini_batches=3))
    assert [trainer.update(credited_batch(step))["train/lr"] for step in range(3)] == [0.25, 0.5, 0.75]


def test_eps_bounds_the_step_of_small_gradients() -> None:
    moved = []
    for eps in (1e-8, 1e3):
        model = small_model()
        before = weights(model)
        Updater(model, TrainSettings(optim=OptimSettings(lr=1e-2, eps=eps, weight_decay=0.0))).update(credited_batch())
        moved.append(gap(before, weights(model)))
    assert moved[1] < 1e-4 < moved[0]


def test_states_in_8_bits_are_refused_by_name_where_they_can_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(MissingDependencyError, match=r"optim\.state_bits.*bitsandbytes"):
        Updater(small_model(), TrainSettings(optim=OptimSettings(state_bits=8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_weights_are_updated_as_all_together(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (optimizer.GROUP_BYTES, 1):
        monkeypatch.setattr(optimizer, "GROUP_BYTES", size)
        model = small_model().to(dtype)
        trainer = Updater(model, TrainSettings(optim=OptimSettings(lr=1e-3), mini_batches=2, max_tokens=60))
        for step in range(2):
            trainer.update(credited_batch(step))
        assert all(parameter.grad is None for parameter in model.parameters())
        results.append({**weights(model), **trainer.optimizer.tensors()})
    assert gap(*results) == 0.0


def test_states_in_main_memory_are_separate_only_where_the_weights_are_elsewhere() -> None:
    half = MasterAdamW(small_model().to(torch.bfloat16).named_parameters(), OptimSettings(in_main_memory=True))
    assert {tensor.device.type for tensor in half.tensors().values()} == {"cpu"}
    assert MasterAdamW(small_model().named_parameters(), OptimSettings(in_main_memory=True)).tensors() == {}
    with torch.device("meta"):
        elsewhere = small_model()
    assert len(MasterAdamW(elsewhere.named_parameters(), OptimSettings()).tensors()) == 0


def nudge(model: Any, optim: MasterAdamW, steps: int, lr: float) -> None:
    """Steps that all go the same way, far below bfloat16's resolution."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert optim.step(lr).applied


def mean_move(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([(after[name].double() - before[name].double()).flatten() for name in before]).mean())


def test_without_float32_copies_small_steps_add_up_on_average() -> None:
    """40 steps of 1e-5, of weights around .2, whose neighbours in bfloat16 are .001 away."""
    model = small_model().to(torch.bfloat16)
    optim = MasterAdamW(model.named_parameters(), OptimSettings(master="none", weight_decay=0.0))
    before = weights(model)
    nudge(model, optim, 40, 1e-5)
    assert mean_move(before, weights(model)) == pytest.approx(-40e-5, rel=0.1)
    assert not any(name.endswith("|master") for name in optim.tensors())
    assert sum(master.numel() for master in optim._masters.values()) == 0


def test_its_rounding_is_the_same_after_a_resume() -> None:
    whole, parts = (small_model().to(torch.bfloat16) for _ in range(2))
    settings = OptimSettings(master="none")
    nudge(whole, MasterAdamW(whole.named_parameters(), settings), 4, 1e-4)
    first = MasterAdamW(parts.named_parameters(), settings)
    nudge(parts, first, 2, 1e-4)
    second = MasterAdamW(parts.named_parameters(), settings)
    second.load(first.tensors())
    nudge(parts, second, 2, 1e-4)
    assert gap(weights(whole), weights(parts)) == 0.0


@pytest.mark.parametrize(("saved", "resumed"), [("float32", "none"), ("none", "float32")])
def test_a_run_may_go_on_with_the_other_choice(saved: Any, resumed: Any) -> None:
    model = small_model().to(torch.bfloat16)
    first = MasterAdamW(model.named_parameters(), OptimSettings(master=saved))
    nudge(model, first, 2, 1e-3)
    other = small_model(seed=1).to(torch.bfloat16)
    second = MasterAdamW(other.named_parameters(), OptimSettings(master=resumed, weight_decay=0.0))
    other.load_state_dict(model.state_dict())
    second.load(first.tensors())
    before = weights(other)
    nudge(other, second, 1, 1e-2)
    assert mean_move(before, weights(other)) == pytest.approx(-1e-2, rel=0.05)


def test_float16_weights_keep_their_copy() -> None:
    model = small_model().to(torch.float16)
    tensors = MasterAdamW(model.named_parameters(), OptimSettings(master="none")).tensors()
    assert len(tensors) == len(weights(model))


@pytest.mark.parametrize("advantage", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("adapters", [False, True])
def test_float16_loses_no_small_gradients(adapters: bool, advantage: float) -> None:
    """A token of a large batch weighs as little as one with the first of these advantages."""
    batch = credited_batch(3)
    for _, credit in batch:
        for call in credit.calls:
            call.entries = [(advantage * each, weight) for each, weight in call.entries]
    moments, norms = [], []
    for dtype in (torch.float32, torch.float16):
        model = small_model().to(dtype)
        if adapters:  # in float32
            model = with_adapters(model, LoraConfig(rank=2))
        trainer = Updater(model, TrainSettings(optim=OptimSettings(clip_grad=1e-3)))
        metrics = trainer.update(batch)
        if dtype is torch.float16 and advantage == 1e3 and not adapters:
            assert not metrics["train/updates"]  # too large for the usual scale, which shrinks
            metrics = trainer.update(batch)
        assert metrics["train/updates"] == 1
        norms.append(metrics["train/grad_norm"])
        found = trainer.optimizer.tensors()
        moments.append(torch.cat([found[name].flatten() for name in sorted(found) if name.endswith("|exp_avg")]))
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert torch.cosine_similarity(*moments, 0) > 0.99
    assert float(moments[1].norm()) == pytest.approx(float(moments[0].norm()), rel=0.02)


def test_a_lowered_scale_of_float16_rises_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "SCALE_DOUBLES_AFTER", 2)
    trainer = Updater(small_model().half(), TrainSettings())
    trainer.optimizer.loss_scale = optimizer.FLOAT16_SCALE / 2
    scales = []
    for step in range(4):
        assert trainer.update(credited_batch(step))["train/updates"] == 1
        scales.append(trainer.optimizer.loss_scale)
    assert scales == [512.0, 1024.0, 1024.0, 1024.0]
