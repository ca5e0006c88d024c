"""Spans as triplets, conversations and tasks; rewards and calls told by clocks that disagree."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ajet.observe.tracing.adapters import (
    CALL,
    EPISODE,
    episode_spans,
    llm_calls,
    matched_rewards,
    to_messages,
    to_tasks,
    to_triplets,
)
from ajet.schema.span import Span
from support.synthetic_run import Vocabulary, math_episode


def call(number: int, start: float, end: float, **more: Any) -> Span:
    attributes = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": f"q{number}",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": f"a{number}",
        "gen_ai.response.id": f"c{number}",
        "agent.name": "solver" if number % 2 == 0 else "critic",
    }
    ids = {"rollout_id": "r", "attempt_id": "a", "trace_id": "t", "span_id": f"s{number}"}
    return Span(**{**ids, "name": CALL, "attributes": attributes, "start_time": start, "end_time": end, **more})


def reward(value: float, at: float, **more: Any) -> Span:
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
    ids = {"rollout_id": "r", "attempt_id": "a", "trace_id": "t", "span_id": f"r{at}"}
    return Span(
        **{**ids, "name": "agentlightning.reward", "attributes": attributes, "start_time": at, "end_time": at, **more}
    )


def test_what_only_looks_like_a_number_is_no_message() -> None:
    span = call(0, 1, 2)
    span.attributes.update({"gen_ai.prompt.².role": "user", "gen_ai.completion.0.tool_calls.².name": "search"})
    (found,) = llm_calls([span])
    assert found.messages == [{"role": "user", "content": "q0"}] and found.reply["content"] == "a0"


def test_a_reward_that_names_a_response_is_its_calls_whatever_the_clocks_say() -> None:
    spans = [call(0, 1, 2), call(1, 3, 4), reward(0.2, 0.0), reward(0.7, 9.0)]
    link = {"agentlightning.link.0.key_match": "gen_ai.response.id", "agentlightning.link.0.value_match": "chatcmpl-c0"}
    spans[2].attributes.update(link)
    assert matched_rewards(llm_calls(spans), spans) == [0.2, 0.7]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], [None, None, None]),
        ([(1.0, 9.0)], [None, None, 1.0]),
        ([(0.1, 2.5), (0.2, 4.5), (0.3, 6.5)], [0.1, 0.2, 0.3]),
        ([(0.1, 9.0), (0.2, 9.1), (0.3, 9.2), (0.4, 9.3)], [0.3, 0.2, 0.1]),
        ([(0.5, 0.5)], [None, None, None]),
        ([(0.7, 3.5)], [0.7, None, None]),
    ],
)
def test_each_reward_goes_to_the_latest_call_before_it_that_has_none(
    rewards: list[tuple[float, float]], expected: list[float | None]
) -> None:
    spans = [call(0, 1, 2), call(1, 3, 4), call(2, 5, 6), *(reward(value, at) for value, at in rewards)]
    assert [one.reward for one in to_triplets(spans)] == expected
    assert [one.reward for one in to_triplets(list(reversed(spans)))] == expected, "whatever the order of arrival"


@pytest.mark.parametrize("offset", [-3600.0, -2.5, 0.0, 7.0, 3600.0])
def test_clocks_that_disagree(offset: float) -> None:
    """The agent's machine tells of the same responses as we do, and of its rewards, by its own clock."""
    there = {"host.name": "elsewhere"}
    seen = [
        Span(
            rollout_id="r",
            attempt_id="a",
            trace_id="t",
            span_id=f"x{number}",
            name="ChatCompletion",
            attributes={"openinference.span.kind": "LLM", "gen_ai.response.id": f"c{number}"},
            start_time=end - 1 + offset,
            end_time=end + offset,
            resource=there,
        )
        for number, end in enumerate((2.0, 4.0, 6.0))
    ]
    given = [reward(value, at + offset, resource=there) for value, at in ((0.1, 2.5), (0.2, 4.5), (0.3, 6.5))]
    ours = [call(0, 1, 2), call(1, 3, 4), call(2, 5, 6)]
    found = matched_rewards(llm_calls(ours), [*ours, *seen, *given])
    assert found == [0.1, 0.2, 0.3]


def test_conversations_and_tasks() -> None:
    tool_call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    first = call(0, 1, 2)
    first.attributes["gen_ai.completion.0.tool_calls"] = json.dumps(tool_call)
    first.attributes["gen_ai.request.functions.0.name"] = "f"
    first.attributes["gen_ai.request.functions.0.parameters"] = '{"type": "object"}'
    records = to_messages([call(1, 3, 4), first, call(0, 1.5, 2)])
    assert [record["messages"][0]["content"] for record in records] == ["q0", "q1"], "one for each response"
    assert records[0]["messages"][1] == {"role": "assistant", "content": "a0", "tool_calls": tool_call}
    assert records[0]["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    (task,) = to_tasks([call(0, 1, 2), call(1, 3, 4)])
    assert (task.main_query, task.metadata["answer"]) == ("q0", "a1")
    assert [one.metadata["agent_name"] for one in to_triplets([call(0, 1, 2), call(1, 3, 4)], agent="crit")] == [
        "critic"
    ]


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": "hi"}]),
        },
        {
            "openinference.span.kind": "LLM",
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": "hello",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": "hi",
        },
    ],
)
def test_other_ways_of_writing_a_call_down(attributes: dict[str, Any]) -> None:
    (record,) = to_messages([call(0, 1, 2, attributes=attributes)])
    assert [(one["role"], one["content"]) for one in record["messages"]] == [("user", "hello"), ("assistant", "hi")]


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.99999999999.content": "x", "gen_ai.prompt.x.role": 5},
        {"gen_ai.input.messages": "{", "gen_ai.output.messages": "[[[["},
        {"gen_ai.input.messages": "[" * 100_000},
        {"openinference.span.kind": "LLM", "llm.output_messages.0.message.tool_calls.9999999.tool_call.id": "x"},
        {"gen_ai.prompt.0.role": None, "gen_ai.request.functions.0.parameters": "{"},
    ],
)
def test_damaged_calls_are_read_as_far_as_they_go(attributes: dict[str, Any]) -> None:
    spans = [call(0, 1, 2, attributes=attributes)]
    to_triplets(spans), to_messages(spans), to_tasks(spans)


def test_an_episode_as_a_trace() -> None:
    episode = math_episode(Vocabulary(), random.Random(0))
    episode.began = 1000.0
    spans = episode_spans(episode, tokens=True)
    whole, calls = spans[0], [span for span in spans if span.name == CALL]
    assert whole.name == EPISODE and len(calls) == len(episode.tree.calls)
    assert {span.trace_id for span in spans} == {whole.trace_id}
    assert {span.parent_id for span in calls} == {whole.span_id}
    assert whole.end_time is not None and all((span.end_time or 0) <= whole.end_time for span in calls)
    triplets = to_triplets(spans)
    assert [one.reward for one in triplets] == [None] * (len(triplets) - 1) + [episode.reward]
    episode.tree.calls[0].reward = 0.25
    assert [one.reward for one in to_triplets(episode_spans(episode))][:2] == [0.25, None]
    assert triplets[0].prompt["token_ids"] == episode.tree.prompt_ids(0).tolist()
    assert triplets[0].response["raw_content"]["content"] == episode.tree.calls[0].reply["content"]
