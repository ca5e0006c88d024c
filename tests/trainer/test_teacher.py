"""A teacher's log-probabilities, and what a student learns from them."""

from __future__ import annotations

import numpy as np
import pytest

from ajet.schema.episode import CallTree
from ajet.trainer.credit.estimators import EpisodeCredit
from ajet.trainer.executor import ModelTeacher
from ajet.trainer.loss import LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import credited_batch
from support.small_models import small_model

OPTIM = OptimSettings(lr=1e-2, weight_decay=0.0)


def without_reward(seed: int) -> list[tuple[CallTree, EpisodeCredit]]:
    batch = credited_batch(seed)
    for _, credit in batch:
        for call in credit.calls:
            call.entries = [(0.0, abs(weight)) for _, weight in call.entries]
    return batch


def test_a_teacher_scores_tokens_as_the_trainer_does() -> None:
    batch = credited_batch(3)
    expected = Updater(small_model(seed=7), TrainSettings(optim=OPTIM)).logprobs(batch)
    for budget in (40, 10_000):
        found = ModelTeacher(small_model(seed=7), budget).logprobs(batch)
        assert found.keys() == expected.keys()
        assert all(found[key] == pytest.approx(expected[key], abs=1e-5) for key in found)
    assert ModelTeacher(small_model(), 100).logprobs([]) == {}


def test_a_teacher_may_be_of_another_family() -> None:
    batch = credited_batch(3)
    found = ModelTeacher(small_model("llama", seed=7), 100).logprobs(batch)
    assert all(np.isfinite(values).all() for values in found.values())


def test_the_gradient_does_not_depend_on_packs() -> None:
    batch = without_reward(1)
    taught = ModelTeacher(small_model(seed=7), 1000).logprobs(batch)
    norms = []
    for budget in (None, 50):
        settings = TrainSettings(LossSettings(correction=None), OPTIM, max_tokens=budget)
        norms.append(Updater(small_model(), settings).update(batch, taught)["train/grad_norm"])
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_the_policy_moves_towards_what_the_teacher_finds_likely() -> None:
    batch = without_reward(2)
    taught = ModelTeacher(small_model(seed=7), 1000).logprobs(batch)
    trainer = Updater(small_model(), TrainSettings(LossSettings(correction=None), OPTIM))
    before = trainer.logprobs(batch)
    trainer.update(batch, taught)
    after = trainer.logprobs(batch)
    agreement = sum(float(((after[key] - before[key]) * (taught[key] - before[key])).sum()) for key in before)
    assert agreement > 0
