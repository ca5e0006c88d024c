"""The optimiser: float32 states whatever the model's dtype, and learning rate schedules."""

from __future__ import annotations

import pytest
import torch
from random_batches import credited_batch
from small_models import gap, small_model, weights

from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.trainer import Trainer, TrainSettings


def test_half_precision_keeps_its_true_weights_in_float32() -> None:
    model = small_model().to(torch.bfloat16)
    trainer = Trainer(model, TrainSettings(optim=OptimSettings(lr=1e-6, weight_decay=0.0)))
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
    assert OptimSettings(lr=0.3).lr_at(10**6) == 0.3
