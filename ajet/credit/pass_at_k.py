"""The advantage of an episode where a group is worth its best of `k` episodes (Chen et al., arXiv 2508.10751).

Of all subsets of k episodes of a group, each is rewarded with 1 if one of its episodes succeeds; an episode's advantage
is the mean over the subsets that hold it of the standardised reward. In closed form, so nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt


def pass_at_k_advantages(successes: Sequence[bool], k: int) -> list[float]:
    """One advantage an episode. All 0 if every subset, or none, holds a success (a group of at most k has one)."""
    count, lost = len(successes), sum(not success for success in successes)
    size = min(k, count)
    passed = 1.0 - comb(lost, size) / comb(count, size)
    deviation = sqrt(passed * (1.0 - passed))
    if deviation == 0.0:
        return [0.0] * count
    # what a subset is worth that holds this failed episode and k - 1 others
    despite = 1.0 - comb(lost - 1, size - 1) / comb(count - 1, size - 1) if lost else 1.0
    return [((1.0 if success else despite) - passed) / deviation for success in successes]
