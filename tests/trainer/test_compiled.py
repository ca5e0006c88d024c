"""Compiled layers give what the same layers give, for packs of any length, and leave the model as it was."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from random_batches import credited_batch
from small_models import gap, small_model, weights

from ajet.trainer.compiled import CompiledForward, layers_to_compile
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.trainer import Trainer, TrainSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"),
]
SGD = OptimSettings(lr=1e-3, eps=1.0, weight_decay=0.0)
"""Steps in proportion to the gradient: Adam itself turns the rounding of tiny gradients into whole steps."""


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what the compiler compiles, by function."""
    from torch._dynamo import convert_frame

    torch._dynamo.reset()
    counts: Counter[str] = Counter()
    compile_inner = convert_frame._compile

    def counted(code: Any, *more: Any, **options: Any) -> Any:
        counts[code.co_qualname] += 1
        return compile_inner(code, *more, **options)

    monkeypatch.setattr(convert_frame, "_compile", counted)
    return counts


def settings(**options: Any) -> TrainSettings:
    return TrainSettings(LossSettings(kl_coef=0.1), SGD, mini_batches=2, max_tokens=60, **options)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "logits_chunk": 7}], ids=["plain", "thrifty"])
def test_updates_are_those_without(options: dict[str, Any], compilations: Counter[str]) -> None:
    """Two mini-batches, packs of many lengths, a reference, five batches."""
    models = [small_model(), small_model()]
    trainers = [
        Trainer(model, settings(compile=compiled, **options), reference=small_model(seed=1))
        for model, compiled in zip(models, (False, True), strict=True)
    ]
    for step in range(5):
        one, other = (trainer.update(credited_batch(step)) for trainer in trainers)
        if step == 1:
            warm = dict(compilations)
        for name in ("loss/total", "loss/kl", "loss/entropy", "train/grad_norm", "loss/ratio_max"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert one["tokens/packs"] > 2
    assert isinstance(trainers[1]._executor([]).forward, CompiledForward)
    assert gap(weights(models[0]), weights(models[1])) < 1e-5
    assert compilations == warm  # nothing is compiled anew for other lengths
    assert all("forward" not in layer.__dict__ for layer in layers_to_compile(models[1]))
