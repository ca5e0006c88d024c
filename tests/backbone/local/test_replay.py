"""`Replay`: which past groups a step trains again, and that a checkpoint keeps them as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ajet.backbone.local.rollouts import FILE, Replay
from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus, Failure
from support.episodes import BRANCHING, make_groups


def groups_of(step: int, count: int = 2) -> list[EpisodeGroup]:
    """The groups of a step, the last with an episode that failed."""
    made = make_groups(BRANCHING, groups=count, size=3, seed=step)
    groups = [EpisodeGroup(f"{step}-{number}", f"t{number}", group) for number, group in enumerate(made)]
    lost = groups[-1].episodes.pop()
    failure = Failure("X", "x")
    failed = Episode(
        "lost", lost.task_id, EpisodeStatus.TIMEOUT, lost.tree, lost.ledger, repeat=lost.repeat, failure=failure
    )
    groups[-1].failed.append(failed)
    return groups


def names(groups: list[EpisodeGroup]) -> list[str]:
    return [group.group_id for group in groups]


def filled(*, groups: int = 2, max_age: int = 2, seed: int = 0, steps: int = 4) -> Replay:
    replay = Replay(groups, max_age, seed)
    for step in range(1, steps + 1):
        replay.add(step, groups_of(step))
    return replay


def test_only_young_groups_are_drawn_and_no_more_than_asked() -> None:
    assert Replay(2, 2, 0).draw(1) == []
    assert names(filled(groups=9).draw(5)) == ["3-0", "3-1", "4-0", "4-1"]
    assert names(filled(groups=9).draw(6)) == ["4-0", "4-1"]
    assert names(filled(groups=9).draw(7)) == []
    assert len(filled(groups=3).draw(5)) == 3
    assert len(filled(groups=0)) == 0 and len(filled(groups=9)) == 4


def test_seed_and_step_decide_what_is_drawn() -> None:
    assert names(filled().draw(5)) == names(filled().draw(5))
    assert len({tuple(names(filled(seed=seed).draw(5))) for seed in range(20)}) > 3


def test_a_checkpoint_keeps_the_groups(tmp_path: Path) -> None:
    before = filled(max_age=3)
    before.write(tmp_path)
    after = Replay(2, 3, 0)
    after.read(tmp_path)
    for step in (5, 6):
        for mine, theirs in zip(before.draw(step), after.draw(step), strict=True):
            assert mine.group_id == theirs.group_id and not theirs.failed and theirs.complete
            for one, other in zip(mine.episodes, theirs.episodes, strict=True):
                assert (one.reward, one.repeat, one.is_success) == (other.reward, other.repeat, other.is_success)
                for call, same in zip(one.tree.calls, other.tree.calls, strict=True):
                    np.testing.assert_array_equal(call.logprobs, same.logprobs)
                    np.testing.assert_array_equal(call.mask, same.mask)
                    assert call.versions == same.versions


def test_a_checkpoint_without_replay_starts_empty(tmp_path: Path) -> None:
    filled(groups=0).write(tmp_path)
    assert not (tmp_path / FILE).exists()
    after = Replay(2, 2, 0)
    after.read(tmp_path)
    assert after.draw(3) == []
