"""`EarlyStop`: when a run ends, from what its validations measured."""

from __future__ import annotations

import json

import pytest

from ajet.backbone.report import EarlyStop
from ajet.schema.errors import ConfigError


def stop(*, patience: int | None = None, min_delta: float = 0.0, target: float | None = None) -> EarlyStop:
    return EarlyStop("val/return/mean", patience=patience, min_delta=min_delta, target=target)


def ends_at(early: EarlyStop, values: list[float | None]) -> int | None:
    """The validation after which the run ends. None among the values: no episode was played."""
    for step, value in enumerate(values):
        measured = {} if value is None else {"val/return/mean": value, "val/success": value}
        early.look_at(step, measured)
        if early.reason is not None:
            return step
    return None


def test_patience_counts_validations_without_a_rise() -> None:
    values: list[float | None] = [0.1, 0.3, 0.3, 0.2, 0.4, 0.3, 0.4, 0.1]
    assert ends_at(stop(patience=2), values) == 3
    assert ends_at(stop(patience=3), values) == 7
    assert ends_at(stop(), values) is None


def test_slow_rises_add_up_to_the_least_that_counts() -> None:
    rising: list[float | None] = [0.0, 0.04, 0.08, 0.12, 0.16, 0.20, 0.24]
    assert ends_at(stop(patience=3, min_delta=0.1), rising) is None
    assert ends_at(stop(patience=2, min_delta=0.1), rising) == 2


def test_a_target_ends_the_run_at_once() -> None:
    assert ends_at(stop(target=0.5), [0.1, 0.49, 0.5]) == 2
    assert ends_at(stop(target=0.5, patience=1), [0.1, 0.1]) == 1


def test_a_validation_without_episodes_says_nothing() -> None:
    assert ends_at(stop(patience=1), [0.1, None, None, 0.2]) is None


def test_the_state_goes_on_where_it_was_and_limits_may_change() -> None:
    before = stop(patience=2)
    assert ends_at(before, [0.3, 0.2, 0.1]) == 2
    for patience, ends in ((2, True), (3, False)):
        after = stop(patience=patience)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert (after.reason is not None) is ends
        assert ends_at(after, [0.3]) == 0
    other = EarlyStop("val/success", patience=1, min_delta=0, target=None)
    other.load_state_dict(before.state_dict())
    assert other.reason is None


def test_a_metric_that_does_not_exist_is_named() -> None:
    early = EarlyStop("val/pass@4", patience=1, min_delta=0, target=None)
    with pytest.raises(ConfigError, match="'val/pass@4'; did you mean val/all_pass@4"):
        early.look_at(1, {"val/success": 0.1, "val/all_pass@4": 0.2})
