"""Emitters and operations: what they write, and where it goes from threads, tasks and pools."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet.observe.tracing import (
    NoRecordingError,
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_rewards_from_span,
    operation,
    record_spans,
)
from ajet.observe.tracing import attributes as names
from ajet.observe.tracing.attributes import MAX_ATTRIBUTES, MAX_TEXT, flat, nested, plain
from ajet.schema.span import Span


@pytest.mark.parametrize(
    "chosen",
    [
        {"reward": 1000},
        {"agentlightning.reward.0.value": 1000, **{str(index): index for index in range(1000)}},
        {"agentlightning": {"reward": [{"name": "primary", "value": 1000}]}},
        {"agentops": {"task.output": '{"type": "reward", "value": 1000}'}},
    ],
)
def test_only_emit_reward_gives_rewards(chosen: dict[str, Any]) -> None:
    """What an annotation or an attribute says may be a model's own words."""
    with record_spans() as spans:
        emit_reward(0.5)
        emit_annotation(chosen)
        emit_message("done", attributes=chosen)
        with operation(name="parse", **chosen):
            pass
    assert find_final_reward(spans) == 0.5
    assert [names.NOT_COUNTED in span.attributes for span in spans][:2] == [False, True]


def test_what_each_emitter_writes() -> None:
    with record_spans() as spans:
        emit_reward(True)
        emit_reward({"style": 1, "correct": np.float32(0.5)}, primary_key="correct")
        emit_annotation({"tool": {"name": "calculator", "tries": [1, 2]}, "steps": [{"a": 1}, {"b": 2}]})
        emit_message("hello")
        emit_object({"a": [1, None]})
        emit_object(b"\x00\xff")
        emit_object(7)
        try:
            raise KeyError("lost")
        except KeyError as error:
            emit_exception(error)
    assert [span.name.removeprefix("agentlightning.") for span in spans] == [
        *("annotation", "annotation", "annotation", "message", "object", "object", "object", "exception")
    ]
    assert get_rewards_from_span(spans[0]) == {"primary": 1.0}
    assert list(get_rewards_from_span(spans[1]).items()) == [("correct", 0.5), ("style", 1.0)]
    assert spans[2].attributes == {
        "tool.name": "calculator",
        "tool.tries": [1, 2],
        "steps.0.a": 1,
        "steps.1.b": 2,
    }
    assert get_message_value(spans[3]) == "hello"
    assert [get_object_value(span) for span in spans[4:7]] == [{"a": [1, None]}, b"\x00\xff", 7]
    assert spans[7].status.status_code == "ERROR"
    assert spans[7].attributes["exception.type"] == "KeyError"
    assert "test_emitters" in spans[7].attributes["exception.stacktrace"]
    assert len(find_reward_spans(spans)) == 2 and find_final_reward(spans) == 0.5


@pytest.mark.parametrize(
    ("reward", "primary", "error"),
    [
        ("1", None, TypeError),
        (None, None, TypeError),
        ([1], None, TypeError),
        (float("nan"), None, ValueError),
        (10**400, None, ValueError),
        ({"a": 1}, None, ValueError),
        ({"a": 1}, "b", ValueError),
        ({}, "a", ValueError),
        ({"a": "x"}, "a", TypeError),
        ({"a": float("inf")}, "a", ValueError),
        (1, "a", ValueError),
    ],
)
def test_what_is_no_reward_is_refused(reward: Any, primary: str | None, error: type[Exception]) -> None:
    with record_spans() as spans, pytest.raises(error):
        emit_reward(reward, primary_key=primary)
    assert spans == []


def test_outside_of_an_episode() -> None:
    with pytest.raises(NoRecordingError, match="no episode is running"):
        emit_message("lost")
    assert get_message_value(emit_message("kept", propagate=False)) == "kept"

    @operation
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, b=2) == 3


def _reward_from_here(answer: Any) -> None:
    @operation
    def add(a: int, b: int) -> int:
        return a + b

    try:
        emit_reward(float(add(0, 1)))
        answer.send("nobody would see it")
    except NoRecordingError as error:
        answer.send(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_cant_lose_a_reward() -> None:
    ours, theirs = multiprocessing.Pipe()
    with record_spans() as spans:
        child = multiprocessing.get_context("fork").Process(target=_reward_from_here, args=(theirs,))
        child.start()
        said = ours.recv()
        child.join()
        assert "emit_reward: this is another process than the episode's" in said
        assert spans == []
        emit_reward(1.0)
    assert len(spans) == 1


def test_operations_nest_and_record_what_went_in_and_out() -> None:
    @operation(name="search", index="small")
    async def search(query: str, limit: int = 3) -> dict[str, int]:
        emit_message("inside")
        return {"found": 2}

    @operation
    def broken() -> None:
        raise ValueError("no")

    async def run() -> None:
        with operation(name="plan") as plan:
            plan.set_input(goal="x")
            await search("cats")
            plan.set_output("done")
        assert plan.span() is not None
        with pytest.raises(ValueError, match="no"):
            broken()

    with record_spans() as spans:
        asyncio.run(run())
    message, inner, outer, failed = spans
    assert (message.parent_id, inner.parent_id) == (inner.span_id, outer.span_id)
    assert inner.attributes == {
        "index": "small",
        "agentlightning.operation.name": "search",
        "agentlightning.operation.input.query": "cats",
        "agentlightning.operation.output.found": 2,
    }
    assert outer.attributes["agentlightning.operation.output"] == "done"
    assert failed.status.status_code == "ERROR" and failed.attributes["exception.message"] == "no"
    assert outer.start_time is not None and outer.end_time is not None and outer.start_time <= outer.end_time


def test_generators_are_operations_that_enclose_nothing_of_their_caller() -> None:
    @operation
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    with record_spans() as spans:
        for number in count(2):
            emit_message(str(number))
    assert [span.name.rpartition(".")[2] for span in spans] == ["message", "message", "operation"]
    assert spans[0].parent_id == spans[2].parent_id != spans[2].span_id
    with record_spans() as spans:
        for _ in count(2):
            break
    assert spans[0].status.status_code == "OK" and "exception.type" not in spans[0].attributes


def test_two_episodes_at_once_keep_their_spans_apart() -> None:
    """In tasks of one loop, in threads that they start, and in a pool that they share."""
    shared = ThreadPoolExecutor(1)
    found: dict[str, list[Span]] = {}

    async def episode(name: str) -> None:
        with record_spans(attempt_id=name) as spans:
            found[name] = spans
            for _ in range(5):
                emit_message(name)
                await asyncio.sleep(0)
                thread = threading.Thread(target=emit_message, args=(name,))
                thread.start()
                thread.join()
                await asyncio.get_running_loop().run_in_executor(shared, emit_message, name)
                await asyncio.to_thread(emit_message, name)

    async def both() -> None:
        await asyncio.gather(episode("one"), episode("two"))

    with shared:
        asyncio.run(both())
        with pytest.raises(NoRecordingError):
            shared.submit(emit_message, "nobody's").result()
    for name, spans in found.items():
        assert [(get_message_value(span), span.attempt_id) for span in spans] == [(name, name)] * 20


class Awkward:
    def __repr__(self) -> str:
        raise RuntimeError("never printed")


def test_awkward_values_become_json_within_limits() -> None:
    with record_spans() as spans:
        emit_annotation({"huge": 10**5000, "half": "\ud800", "object": Awkward(), "nan": float("nan"), "bytes": b"x"})
        emit_annotation({str(index): index for index in range(1000)})
        emit_message("x" * 10**6)
        deep: dict[str, Any] = {}
        for _ in range(200):
            deep = {"a": deep}
        emit_object(deep)
    assert len(spans[1].attributes) == MAX_ATTRIBUTES + 1
    said = get_message_value(spans[2])
    assert said is not None and len(said) < MAX_TEXT + 100 and said.endswith("more characters)")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )
)
@settings(deadline=None, max_examples=50)
def test_any_value_becomes_json(value: Any) -> None:
    plain(value)
    flat({"value": value})


def test_flat_and_back() -> None:
    given_ = {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": "x"}
    assert nested(flat(given_)) == given_
    assert nested({"p.a.b": 1, "q": 2}, "p.") == {"a": {"b": 1}}
