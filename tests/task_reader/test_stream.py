"""`TaskStream`: every task each epoch, in an order that only seed and epoch decide, from any position."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet.schema.task import Task
from ajet.task_reader import TaskStream


def tasks(count: int) -> list[Task]:
    return [Task(main_query=str(n), task_id=str(n)) for n in range(count)]


def ids(stream: TaskStream, batches: int) -> list[str]:
    return [task.task_id for _ in range(batches) for task in stream.next_batch()]


@given(count=st.integers(1, 20), batch=st.integers(1, 30), seed=st.integers(0, 5), before=st.integers(0, 9))
def test_a_resumed_stream_goes_on_exactly(count: int, batch: int, seed: int, before: int) -> None:
    whole = TaskStream(tasks(count), seed=seed, batch_size=batch)
    first = ids(whole, before)
    resumed = TaskStream(tasks(count), seed=seed, batch_size=batch)
    resumed.load_state_dict(whole.state_dict())
    rest = ids(resumed, 6)
    assert rest == ids(whole, 6)
    epoch = Counter((first + rest)[:count])
    assert len(first + rest) < count or set(epoch.values()) == {1}


@given(count=st.integers(1, 6), batch=st.integers(1, 9), seed=st.integers(0, 5))
def test_occurrences_are_those_that_a_step_counts(count: int, batch: int, seed: int) -> None:
    stream = TaskStream(tasks(count), seed=seed, batch_size=batch)
    for step in range(4):
        seen: Counter[str] = Counter()
        for offset in range(batch):
            name = stream.task_at(step * batch + offset).task_id
            assert stream.occurrence_at(step * batch + offset) == seen[name]
            seen[name] += 1


def test_each_epoch_is_shuffled_differently_and_repeatably() -> None:
    stream = TaskStream(tasks(50), seed=3, batch_size=50)
    first, second = ids(stream, 1), ids(stream, 1)
    assert first != second != sorted(second)
    assert ids(TaskStream(tasks(50), seed=3, batch_size=50), 2) == first + second
    assert ids(TaskStream(tasks(50), seed=4, batch_size=50), 1) != first
    # fixed, so that a run may resume under another Python version
    assert first[:5] == ["27", "47", "39", "31", "6"]


def test_order_and_epochs() -> None:
    stream = TaskStream(tasks(5), seed=0, batch_size=3, shuffle=False)
    assert ids(stream, 2) == ["0", "1", "2", "3", "4", "0"]
    assert stream.epoch == 6 / 5


def test_another_batch_size_and_changed_tasks(caplog: pytest.LogCaptureFixture) -> None:
    stream = TaskStream(tasks(8), seed=0, batch_size=2)
    ids(stream, 2)
    other = TaskStream(tasks(8), seed=0, batch_size=4)
    other.load_state_dict(stream.state_dict())
    assert ids(other, 1) == ids(stream, 2)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        TaskStream(tasks(9), seed=0, batch_size=2).load_state_dict(stream.state_dict())
    assert "changed since the checkpoint" in caplog.text


def test_no_tasks() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        TaskStream([], seed=0, batch_size=1)
