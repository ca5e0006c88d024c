"""`Curriculum`: probabilities by solve rate, draws that seed and record decide, and a record that survives a resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import Curriculum

TASKS = [Task(main_query=name, task_id=name) for name in "abcde"]


def make(*, seed: int = 0, batch: int = 2, explore: float = 0.2, memory: float = 0.5) -> Curriculum:
    return Curriculum(TASKS, seed=seed, batch_size=batch, explore=explore, memory=memory)


def ids(stream: Curriculum) -> list[str]:
    return [task.task_id for task in stream.next_batch()]


def test_probabilities_follow_the_variance_of_success() -> None:
    stream = make()
    stream.note("a", 4, 4)
    stream.note("b", 0, 4)
    stream.note("c", 1, 4)
    stream.note("d", 2, 4)  # e was never tried
    weights = [0.0, 0.0, 0.75, 1.0, 1.0]
    expected = [0.8 * weight / sum(weights) + 0.2 / 5 for weight in weights]
    assert stream.probabilities() == pytest.approx(expected)
    drawn = Counter(name for _ in range(2000) for name in ids(make_like(stream, batch=1)))
    for name, probability in zip("abcde", expected, strict=True):
        assert drawn[name] / 2000 == pytest.approx(probability, abs=0.04)


_position = 0


def make_like(other: Curriculum, *, batch: int) -> Curriculum:
    """The same record, at another position of the stream each time."""
    global _position
    _position += 1
    stream = make(batch=batch)
    stream.load_state_dict(other.state_dict() | {"position": _position})
    return stream


def test_recent_tries_count_more() -> None:
    stream = make(memory=0.5)
    stream.note("a", 0, 4)
    stream.note("a", 4, 4)
    assert stream.solve_rate("a") == pytest.approx(4 / 6)
    stream.note("a", 0, 0)  # all its episodes were faults: nothing is known
    assert stream.solve_rate("a") == pytest.approx(4 / 6)
    forgetful = make(memory=0.0)
    forgetful.note("a", 0, 4)
    forgetful.note("a", 4, 4)
    assert forgetful.solve_rate("a") == 1.0
    assert stream.solve_rate("b") is None


def test_without_exploring_what_is_always_or_never_solved_is_left_until_all_are() -> None:
    stream = make(explore=0.0, batch=2)
    for name in "abc":
        stream.note(name, 0, 4)
    assert all(set(ids(stream)) == {"d", "e"} for _ in range(20))
    stream.note("d", 4, 4)
    stream.note("e", 4, 4)
    assert stream.probabilities() == [0.2] * 5
    assert len({name for _ in range(50) for name in ids(stream)}) == 5


@given(batch=st.integers(1, 13), seed=st.integers(0, 3))
def test_no_task_occurs_twice_before_all_have_occurred_once(batch: int, seed: int) -> None:
    stream = make(batch=batch, seed=seed)
    stream.note("a", 1, 4)
    counts = Counter(ids(stream))
    assert sum(counts.values()) == batch
    assert max(counts.values()) - min(counts.get(name, 0) for name in "abcde") <= 1


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 4)), max_size=12), st.integers(0, 4))
def test_a_resumed_curriculum_goes_on_exactly(solved: list[tuple[str, int]], at: int) -> None:
    whole, resumed = make(), make()
    for index, (name, successes) in enumerate(solved):
        if index == at:
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        for stream in (whole, resumed) if index >= at else (whole,):
            ids(stream)
            stream.note(name, successes, 4)
    if len(solved) > at:
        assert [ids(whole) for _ in range(4)] == [ids(resumed) for _ in range(4)]


def test_the_record_of_tasks_that_are_gone_is_dropped() -> None:
    stream = make()
    stream.note("a", 1, 4)
    state = stream.state_dict()
    state["solved"]["z"] = [1.0, 4.0]
    other = make(seed=1)
    other.load_state_dict(state)
    assert other.solve_rate("z") is None and other.solve_rate("a") == 0.25
    del state["solved"]  # of a run without a curriculum
    other.load_state_dict(state)
    assert other.solve_rate("a") is None
