"""Shares and paired differences, against enumerations and tables of their own."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import pytest

from ajet.observe.statistics import Gain, Share, sign_flip_p, t_quantile


def test_intervals_are_wilsons() -> None:
    assert Share.of([0.0] * 10) == pytest.approx((0, 0, 0.2775), abs=1e-3)
    assert Share.of([1.0] * 10) == pytest.approx((1, 0.7225, 1), abs=1e-3)
    assert Share.of([1.0] * 8 + [0.0] * 8) == pytest.approx((0.5, 0.28, 0.72), abs=1e-2)


@pytest.mark.parametrize(
    ("freedom", "table"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (30, 2.04227), (127, 1.97882), (100_000, 1.95999)],
)
def test_t_quantiles_are_those_of_the_table(freedom: int, table: float) -> None:
    assert t_quantile(freedom) == pytest.approx(table, rel=2e-4)


def enumerated(differences: list[float]) -> float:
    """The definition: all 2^n signs."""
    sums = [
        abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(value >= abs(math.fsum(differences)) - 1e-9 for value in sums) / len(sums)


def test_few_tasks_are_counted_out() -> None:
    dice = Random(3)
    for count in range(1, 11):
        differences = [dice.choice((-0.5, -0.25, 0.0, 0.25, 0.5, 1.0)) for _ in range(count)]
        assert sign_flip_p(differences) == pytest.approx(enumerated(differences))
    assert sign_flip_p([0.0, 0.0]) == 1
    assert sign_flip_p([1.0] * 5) == 2 / 32


def test_many_tasks_are_drawn_and_agree_with_the_enumeration() -> None:
    dice = Random(5)
    differences = [dice.gauss(0.3, 1) for _ in range(14)]
    assert sign_flip_p(differences) == pytest.approx(enumerated(differences), abs=0.015)
    assert sign_flip_p(differences) == sign_flip_p(differences)


def test_a_gain_is_measured_on_the_tasks_of_both() -> None:
    before = {"a": 0.0, "b": 0.25, "c": 0.5, "d": 1.0, "only before": 1.0}
    after = {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.75, "only after": 0.0}
    gain = Gain.of(before, after)
    assert gain is not None and (gain.tasks, gain.unshared, gain.better, gain.worse) == (4, 2, 2, 1)
    # by hand: mean 0.125, sum of squares about it 0.3125, standard error sqrt(0.3125 / 3 / 4)
    half = 3.18245 * math.sqrt(0.3125 / 12)
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.125, 0.125 - half, 0.125 + half), abs=1e-3)
    assert gain.p == pytest.approx(enumerated([0.5, 0.25, 0.0, -0.25]))
    assert str(gain).startswith("+0.125  (-0.389 … +0.639)  p 0.75")


def test_the_pairing_finds_what_two_intervals_hide() -> None:
    before = {str(n): n / 30 for n in range(30)}
    after = {name: value + 0.05 + 0.01 * (-1) ** int(name) for name, value in before.items()}
    apart = Share.of(list(before.values())), Share.of([min(1, value) for value in after.values()])
    gain = Gain.of(before, after)
    assert gain is not None and gain.low > 0 and gain.p < 0.001
    assert apart[0].high > apart[1].low


def test_too_little_to_say() -> None:
    assert Gain.of({"a": 1.0}, {"b": 1.0}) is None
    one = Gain.of({"a": 0.0}, {"a": 1.0})
    assert one is not None and one.p == 1 and one.low < 0 < one.high and "one task: no interval" in str(one)
