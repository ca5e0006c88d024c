"""Rewards: only finite numbers get in."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ajet.schema.errors import RewardError
from ajet.schema.task import finite_reward


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.array(1.0), Fraction(2, 2)])
def test_numbers_of_any_library_become_floats(value: Any) -> None:
    reward = finite_reward(value, "the reward")
    assert reward == 1.0 and type(reward) is float


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), 10**400, None, True, "1", [1.0], 1j])
def test_anything_else_is_an_error_and_never_zero(value: Any) -> None:
    with pytest.raises(RewardError, match=r"tuner\.reward must be a finite number, not"):
        finite_reward(value, "tuner.reward")
