"""Which replies to one prompt were drawn together, against the plain definition."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.context_tracker.conversation import Turn
from ajet.context_tracker.samples import _draws


def by_definition(group: list[Any], records: list[Any]) -> list[list[Any]]:
    """Each request between the end of a draw's first reply and the next reply's request is looked at."""
    turn, agent = group[0].turn, group[0].call.agent
    moves = [
        other.begun
        for other in records
        if other.turn.follows(turn) or (other.call.agent == agent and turn.follows(other.turn))
    ]
    draws = [[group[0]]]
    for record in group[1:]:
        first_ended = min(earlier.ended for earlier in draws[-1])
        if any(first_ended < move < record.begun for move in moves):
            draws.append([])
        draws[-1].append(record)
    return draws


def some_calls(rng: random.Random) -> list[Any]:
    """Calls of two agents in a small tree of messages; several are in flight at a time."""
    turns = [Turn({"role": "user", "content": "0"}, None, 1)]
    for index in range(4):
        parent = rng.choice(turns)
        turns.append(Turn({"role": "user", "content": str(index)}, parent, parent.depth + 1))
    records: list[Any] = []
    clock, in_flight = 0, []
    while len(records) < 25 or in_flight:
        clock += 1
        if in_flight and (len(records) == 25 or rng.random() < 0.5):
            in_flight.pop(rng.randrange(len(in_flight))).ended = clock
        else:
            call = SimpleNamespace(agent=rng.choice(["a", "b"]))
            records.append(SimpleNamespace(turn=rng.choice(turns), call=call, begun=clock, ended=0))
            in_flight.append(records[-1])
    return records


@pytest.mark.parametrize("seed", range(20))
def test_draws_are_split_where_the_conversation_moved_on(seed: int) -> None:
    records = some_calls(random.Random(seed))
    groups: dict[Any, list[Any]] = {}
    for record in records:
        groups.setdefault((id(record.turn), record.call.agent), []).append(record)
    split = 0
    for group in groups.values():
        found = [[record.begun for record in draw] for draw in _draws(group, records)]
        assert found == [[record.begun for record in draw] for draw in by_definition(group, records)]
        split += len(found) > 1
    assert split
