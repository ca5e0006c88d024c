"""Random episodes: the same tree in any order of arrival, a balanced ledger, exact samples, an identical round trip."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajet.context_tracker import FinishedCalls, linear_samples
from ajet.observe.episode_codec import decode_episode, encode_episode
from ajet.schema.episode import CallTree, EpisodeStatus
from support.call_trees import isomorphic
from support.tracker_helpers import SEARCH, WIDE, Drive, assert_faithful, called, episode_of, result, said, system, user

COMMON = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
FAMILIES = ("qwen2_5", "qwen3", "mistral", "deepseek_r1", "glm", "chatml")


@dataclass
class Asked:
    """A call that an episode makes, in whatever order."""

    agent: str
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    text: str
    tools: list[dict[str, Any]]
    trainable: bool
    finish: str


def waves(seed: int, count: int) -> list[list[Asked]]:
    """Calls in waves: those of one wave run concurrently, and the next wave knows their replies."""
    rng = random.Random(seed)
    talks = [(f"agent{n % 2}", [system(f"You are {n % 3}."), user(f"Task {n % 2}")]) for n in range(rng.randint(1, 4))]
    asked: list[list[Asked]] = []
    for index in range(count):
        wave = []
        for place, (agent, messages) in enumerate(list(talks)):
            if rng.random() < 0.3:
                continue
            for choice in range(2 if rng.random() < 0.2 else 1):
                text = f"Reply {index} {place} {choice} " + "word " * rng.randint(0, 6)
                reply = said(text.strip())
                if rng.random() < 0.3:
                    reply = called(f"c{index}_{place}", text.strip())
                finish = "length" if rng.random() < 0.1 else "stop"
                tools = [SEARCH] if rng.random() < 0.5 else []
                wave.append(Asked(agent, list(messages), reply, text, tools, rng.random() > 0.15, finish))
            messages.append(reply)
            if "tool_calls" in reply:
                messages.append(result(reply["tool_calls"][0]["id"], "found"))
            else:
                messages.append(user(f"Next {index}?"))
            if rng.random() < 0.15:  # the memory is rewritten
                messages[1:] = [user(f"Summary {index}.")]
            if rng.random() < 0.15 and messages[-1]["role"] == "user":  # a sub-agent starts from what is known
                talks.append((f"agent{rng.randint(0, 2)}", [*messages, user(f"Sub-task {index}")]))
        asked.append(wave)
    return asked


def play(
    asked: list[list[Asked]], family: str, order: random.Random | None, drift: float = 0.3
) -> tuple[Drive, FinishedCalls]:
    drive = Drive(family, replace(WIDE, checks=()), drift=drift)
    for wave in asked:
        begins = list(range(len(wave)))
        ends = list(range(len(wave)))
        if order is not None:
            order.shuffle(begins)
            order.shuffle(ends)
        begun = {}
        for place in begins:
            call = wave[place]
            begun[place] = drive.begin(call.messages, agent=call.agent, tools=call.tools, trainable=call.trainable)
        for place in ends:
            call = wave[place]
            drive.rng = random.Random(call.text)  # the sample depends on the call, not on the order
            drive.commit(begun[place], call.reply, call.text, finish=call.finish)
    return drive, drive.tracker.finish(1.0)


@COMMON
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(FAMILIES), st.integers(0, 10**6))
def test_any_order_of_arrival_gives_the_same_tree(seed: int, count: int, family: str, order: int) -> None:
    asked = waves(seed, count)
    _, first = play(asked, family, None)
    _, second = play(asked, family, random.Random(order))
    assert isomorphic(first.tree, second.tree)
    assert first.ledger == second.ledger


@COMMON
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(FAMILIES))
def test_every_call_is_trained_exactly_as_the_engine_saw_it(seed: int, count: int, family: str) -> None:
    drive, episode = play(waves(seed, count), family, None)
    assert_faithful(drive, episode.tree)
    check_shape(episode.tree)


@COMMON
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.sampled_from(["once", "multiplicity"]),
    st.integers(1, 400),
    st.integers(1, 400),
    st.integers(1, 5),
)
def test_ledgers_balance_under_any_limits(
    seed: int, count: int, loss: Any, prompt: int, response: int, samples: int
) -> None:
    _, episode = play(waves(seed, count), "qwen2_5", None)
    episode.ledger.balance()
    rows, ledger = linear_samples(
        episode.tree,
        shared_token_loss=loss,
        max_prompt_length=prompt,
        max_response_length=response,
        max_samples=samples,
    )
    ledger.balance()
    assert ledger.captured == episode.ledger.captured == episode.tree.sampled_tokens
    assert len(rows) <= samples
    assert all(len(row.prompt_ids) <= prompt and len(row.response_ids) <= response for row in rows)
    if loss == "once":
        assert ledger.trained == sum(int(row.response_mask.sum()) for row in rows)


@COMMON
@given(st.integers(0, 10**6), st.integers(0, 5), st.sampled_from(list(EpisodeStatus)))
def test_a_round_trip_through_storage_is_identical(seed: int, count: int, status: EpisodeStatus) -> None:
    drive, calls = play(waves(seed, count), "qwen2_5", None)
    episode = episode_of(calls)
    episode.status = status
    episode.metadata = {"α": [1, 2.5, None, True], "nested": {"deep": "text"}}
    again = decode_episode(encode_episode(episode))
    assert_equal(episode, again)
    assert encode_episode(again) == encode_episode(episode)
    assert_faithful(drive, again.tree)


def check_shape(tree: CallTree) -> None:
    """What all other code may rely on."""
    for index, run in enumerate(tree.runs):
        assert run.parent < index and len(run.ids)
        parent = tree.runs[run.parent] if run.parent >= 0 else None
        assert run.start == (parent.start + len(parent.ids) if parent else 0)
        assert run.call < 0 or tree.calls[run.call].run == index
    for siblings in [*tree.children(), [i for i, run in enumerate(tree.runs) if run.parent < 0]]:
        firsts = [int(tree.runs[i].ids[0]) for i in siblings if tree.runs[i].call < 0]
        assert len(firsts) == len(set(firsts)), "context runs that begin alike must have merged"
    for call in tree.calls:
        prompt = tree.runs[call.prompt_run]
        assert call.prompt_tokens == prompt.start + len(prompt.ids)
        if call.run >= 0:
            assert tree.runs[call.run].parent == call.prompt_run
            assert len(call.mask) == len(call.logprobs) == len(tree.runs[call.run].ids)


def assert_equal(first: Any, second: Any) -> None:
    """Equality through dataclasses that hold arrays."""
    assert type(first) is type(second)
    if hasattr(first, "dtype"):
        assert first.dtype == second.dtype and first.tolist() == second.tolist()
    elif hasattr(first, "__dataclass_fields__"):
        for name in first.__dataclass_fields__:
            assert_equal(getattr(first, name), getattr(second, name))
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_equal(a, b)
    else:
        assert first == second


def test_messages_of_any_text_are_rendered_and_continued() -> None:
    @COMMON
    @given(st.lists(st.text(max_size=60), min_size=1, max_size=5), st.sampled_from(FAMILIES))
    def run(texts: list[str], family: str) -> None:
        drive = Drive(family, replace(WIDE, checks=()))
        messages: list[dict[str, Any]] = []
        for text in texts:
            messages.append(user(text))
            drive.ask(messages, said(text), text="x" + text.encode("utf-8", "ignore").decode())
        json.dumps(messages)
        assert_faithful(drive, drive.tracker.finish(1.0).tree)

    run()
