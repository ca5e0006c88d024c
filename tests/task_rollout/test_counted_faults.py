"""The benchmark of faults in small: real services, real crashes, and every failure under its own type."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import faults


@pytest.mark.slow
@pytest.mark.parametrize(("isolated", "episodes", "parallel"), [(False, 1000, 64), (True, 60, 8)])
def test_every_failure_is_counted_under_its_type(isolated: bool, episodes: int, parallel: int) -> None:
    figures = faults.run(episodes, isolated=isolated, parallel=parallel)
    assert figures["episodes"] == episodes
    assert figures["wrong"] == 0, figures["found"]
    assert figures["rewards_of_failed"] == 0
    assert figures["unnamed_failures"] == 0
    failed = sum(count for kind, count in figures["found"].items() if not kind.startswith("well"))
    assert failed == round(episodes * faults.FAULTY_SHARE)
    assert figures["episode_threads_left"] == 0
