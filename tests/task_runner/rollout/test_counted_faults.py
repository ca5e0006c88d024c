"""Real services, real crashes, and every failure counted under its own type."""

from __future__ import annotations

import pytest

from support import faulty_run


@pytest.mark.slow
@pytest.mark.parametrize(("isolated", "episodes", "parallel"), [(False, 1000, 64), (True, 60, 8)])
def test_every_failure_is_counted_under_its_type(isolated: bool, episodes: int, parallel: int) -> None:
    figures = faulty_run.run(episodes, isolated=isolated, parallel=parallel)
    assert figures["episodes"] == episodes
    assert figures["wrong"] == 0, figures["found"]
    assert figures["rewards_of_failed"] == 0
    assert figures["unnamed_failures"] == 0
    failed = sum(count for kind, count in figures["found"].items() if not kind.startswith("well"))
    assert failed == round(episodes * faulty_run.FAULTY_SHARE)
    assert figures["episode_threads_left"] == 0
