"""Stored episodes: identical after a round trip, and damaged ones are refused with a named error."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel

from ajet.observe.episode_codec import decode_annotation, decode_episode, encode_episode
from ajet.schema.chat import Sampling
from ajet.schema.episode import (
    Call,
    CallTree,
    Episode,
    EpisodeStatus,
    Failure,
    Fork,
    Ledger,
    LedgerImbalance,
    Outcome,
    Run,
)
from ajet.schema.errors import EpisodeFormatError
from support.call_trees import isomorphic


def tree() -> CallTree:
    """A prompt, two replies to it, and a question after the first."""
    context, reply = np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)
    runs = [Run(context, -1, 0), Run(reply, 0, 3, call=0), Run(reply.copy(), 0, 3, call=1), Run(context.copy(), 1, 5)]
    calls = [
        Call(
            name=f"call-{index}",
            agent="agent",
            target="target",
            turn=0,
            prompt_run=0,
            prompt_tokens=3,
            run=index + 1,
            logprobs=np.array([-0.5, -1.5 - index], np.float32),
            mask=np.array([True, index == 0]),
            versions=[(0, 1), (1, 2)],
            sampling=Sampling(stop=("x",), stop_token_ids=(9,)),
            reply={"role": "assistant", "content": "é"},
            replaces_outcome=index == 1,
            new_messages=[{"role": "user", "content": "Go."}],
            fork=Fork("message_changed", 0, "messages[1]", 3) if index else None,
        )
        for index in range(2)
    ]
    return CallTree(runs, calls, [[{"type": "function", "function": {"name": "search"}}]])


def episode() -> Episode:
    return Episode(
        episode_id="e",
        task_id="t",
        status=EpisodeStatus.TRUNCATED,
        tree=tree(),
        ledger=Ledger(4, 3, {"abandoned": 1}, {}),
        reward=0.5,
        agent_rewards={"agent": 1.0},
        outcomes=(Outcome.LENGTH,),
        failure=Failure("ValueError", "no", "trace"),
    )


def test_an_episode_survives_storage() -> None:
    again = decode_episode(encode_episode(episode()))
    assert again.status is EpisodeStatus.TRUNCATED and again.outcomes == (Outcome.LENGTH,)
    assert again.failure == episode().failure and again.ledger == episode().ledger
    assert isomorphic(again.tree, tree())
    call = again.tree.calls[1]
    assert call.sampling == tree().calls[1].sampling and call.fork == tree().calls[1].fork
    assert call.versions == [(0, 1), (1, 2)] and call.mask.dtype == np.bool_
    assert again.tree.runs[3].start == 5


class Mixed(BaseModel):
    held: Any


def test_a_user_s_own_objects_in_metadata_are_kept_as_data_or_text() -> None:
    stored = episode()
    stored.metadata = {"array": np.arange(3), "number": np.float32(0.5), "path": Path("x"), "list": [1, (2, 3)]}
    stored.metadata["model"] = Mixed(held=[Path("y"), np.float32(2.5)])
    metadata = decode_episode(encode_episode(stored)).metadata
    assert metadata["array"] == [0, 1, 2] and metadata["number"] == 0.5 and "x" in metadata["path"]
    assert "y" in metadata["model"]["held"][0] and metadata["model"]["held"][1] == 2.5


def packed(record: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(record))


def test_every_damaged_record_is_an_error_with_a_name() -> None:
    data = encode_episode(episode())
    inner = zlib.decompress(data)
    damaged = [data[:cut] for cut in range(0, len(data), 7)]
    damaged += [zlib.compress(inner[:cut]) for cut in range(0, len(inner), 7)]
    damaged += [b"", b"text", inner, packed([1]), packed({"format": 1}), zlib.compress(b"\x91" * 100_000)]
    for wrong in damaged:
        with pytest.raises(EpisodeFormatError):
            decode_episode(wrong)
    with pytest.raises(EpisodeFormatError, match="update ajet"):
        decode_episode(packed({"format": 99}))


def test_a_record_is_not_decompressed_without_end() -> None:
    stored = episode()
    stored.metadata = {"repeated": "a" * 20_000_000}
    assert decode_episode(encode_episode(stored)).metadata == stored.metadata
    bomb = zlib.compress(bytes(100_000_000))
    for read in (decode_episode, decode_annotation):
        with pytest.raises(EpisodeFormatError, match="too large for its compressed size"):
            read(bomb)


@pytest.mark.parametrize(
    ("column", "value"),
    [("parents", [-1, 5, 0, 1]), ("run_calls", [-1, 0, 9, -1]), ("lengths", [3, 2, 2, 2]), ("ids", b"123")],
)
def test_a_record_with_dangling_references_is_refused(column: str, value: object) -> None:
    record = msgspec.msgpack.decode(zlib.decompress(encode_episode(episode())))
    record["episode"]["tree"][column] = value
    with pytest.raises(EpisodeFormatError, match="damaged"):
        decode_episode(packed(record))


@pytest.mark.parametrize(("name", "value"), [("extends", 0), ("extends", 1), ("extends", -2), ("tools", 1)])
def test_a_call_that_extends_itself_or_has_no_such_tools_is_refused(name: str, value: int) -> None:
    record = msgspec.msgpack.decode(zlib.decompress(encode_episode(episode())))
    record["episode"]["tree"]["calls"][0][name] = value
    with pytest.raises(EpisodeFormatError, match="damaged"):
        decode_episode(packed(record))


def test_isomorphic_sees_what_was_sampled_and_not_the_order() -> None:
    first, second = tree(), tree()
    second.calls.reverse()
    for index, call in enumerate(second.calls):
        second.runs[call.run].call = index
        call.name = f"other-{index}"
    assert isomorphic(first, second)
    second.calls[0].logprobs = second.calls[0].logprobs - 1
    assert not isomorphic(first, second)
    third = tree()
    third.calls[0].agent = "another"
    assert not isomorphic(first, third)


def test_a_path_is_what_the_engine_saw() -> None:
    found = tree()
    assert found.path(3) == [0, 1, 3]
    assert found.path_ids(3).tolist() == [5, 6, 7, 8, 9, 5, 6, 7]
    assert found.prompt_ids(1).tolist() == [5, 6, 7]
    assert found.children() == [[1, 2], [3], [], []]
    assert (found.tokens, found.sampled_tokens, found.trained_tokens) == (10, 4, 3)


def test_a_ledger_that_lost_a_token_raises() -> None:
    ledger = Ledger(4, 3, {"abandoned": 1}, {})
    ledger.balance()
    ledger.add(Ledger(2, 0, {"abandoned": 1}, {"aborted": 1}))
    ledger.balance()
    assert ledger == Ledger(6, 3, {"abandoned": 2}, {"aborted": 1})
    ledger.trained -= 1
    with pytest.raises(LedgerImbalance, match="captured 6 tokens but accounted for 5"):
        ledger.balance()
