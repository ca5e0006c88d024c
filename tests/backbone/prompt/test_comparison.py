"""The best templates beside the start: luck isn't taken for skill."""

from __future__ import annotations

import math
import random

import pytest

from ajet.backbone.prompt.journal import TemplateComparison
from ajet.prompt_tuning import Purpose, Score, Trial


def test_noise_is_seldom_called_a_gain() -> None:
    draw = random.Random(2)
    false = 0
    for _ in range(400):
        differences = [float(draw.choice((-1, 0, 0, 1))) for _ in range(12)]
        found = TemplateComparison.of(score("a", *[0.0] * 12), score("b", *differences))
        false += found is not None and not found.within_noise
    assert false / 400 < 0.08


def score(name: str, *rewards: float | None) -> Score:
    trials = [Trial(f"t{number}", reward, fault=reward is None) for number, reward in enumerate(rewards)]
    return Score(name, Purpose.CONFIRMATION, tuple(trials))


def test_a_comparison_is_paired() -> None:
    found = TemplateComparison.of(score("a", 0.1, 0.9, 0.3, None, 0.5), score("b", 0.2, 1.0, 0.4, 1.0, 0.6))
    assert found is not None
    assert found.gain.tasks == 4 and found.gain.value == pytest.approx(0.1)
    assert found.gain.low == pytest.approx(0.1) and found.gain.high == pytest.approx(0.1), "the same gain everywhere"
    assert found.gain.p == 2 / 2**4 and found.within_noise, "four tasks can't say more"


def test_one_task_says_nothing() -> None:
    found = TemplateComparison.of(score("a", 0.0), score("b", 1.0))
    assert found is not None and found.within_noise and math.isinf(found.gain.high)
    assert TemplateComparison.of(score("a", None), score("b", 1.0)) is None


def test_equal_scores_are_noise_and_a_clear_gain_is_not() -> None:
    same = TemplateComparison.of(score("a", *[0.5] * 9), score("b", *[0.5] * 9))
    assert same is not None and same.within_noise and same.gain.p == 1.0
    clear = TemplateComparison.of(score("a", *[0.0] * 12), score("b", *[1.0] * 10, 0.0, 0.0))
    assert clear is not None and not clear.within_noise and clear.gain.better == 10 and clear.gain.worse == 0
    many = TemplateComparison.of(score("a", *[0.0] * 40), score("b", *[1.0] * 25, *[0.0] * 15))
    assert many is not None and not many.within_noise
