"""The simulator of `benchmarks/scale.py`, where the seconds of a step can be worked out by hand."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.pages import ROOT


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield import_module("scale")
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(Path(getattr(sys.modules[name], "__file__", None) or "/")):
            del sys.modules[name]


def costs(scale: Any, **others: Any) -> Any:
    """A turn of 10 tokens, then a tool that takes 3 s; nothing else takes any time but a token and an update."""
    plain = {name: 0.0 for name in ("prefill", "host", "update_token", "sync", "rest")}
    given = {"decode": 0.1, "decode_each": 0.1, "update": 5.0, "slowed": 1.0, "opening": 4, "turn": 2}
    spreads = {"latency": (0.0,), "between": (0.0,), "tool": (math.log(3), 0.0), "replies": (10,), "turns": (1,)}
    return scale.Costs(**plain | given | spreads | others)


def ends(scale: Any, costs: Any, load: Any, fleet: Any) -> list[float]:
    return [round(end, 6) for end in scale.World(costs, load, fleet, 0).ends]


def test_a_synchronous_step_is_its_replies_its_tools_and_its_update(scale: Any) -> None:
    load, fleet = scale.Load(1, steps=3), scale.Fleet()
    # four replies at a time: 10 tokens x (.1 + 4 x .1) s
    assert ends(scale, costs(scale), load, fleet) == [13.0, 26.0, 39.0]
    assert ends(scale, costs(scale), load, replace(fleet, engines=4)) == [10.0, 20.0, 30.0]
    assert ends(scale, costs(scale), load, replace(fleet, slots=2))[0] == 17.0  # two by two, tools too
    # a prompt of 4 tokens keeps everybody waiting; a gateway takes call after call
    assert ends(scale, costs(scale, prefill=0.25), load, fleet)[0] == 17.0
    assert ends(scale, costs(scale, host=1.0, decode_each=0.0), load, fleet)[0] == 13.0
    assert ends(scale, costs(scale, host=1.0, decode_each=0.0), load, replace(fleet, gateways=4))[0] == 10.0
    assert ends(scale, costs(scale, update_token=0.1), load, replace(fleet, trainers=2))[0] == 13.0 + 4 * 14 * 0.05


def test_one_step_ahead_the_shorter_of_rollout_and_update_is_hidden(scale: Any) -> None:
    load = scale.Load(1, ahead=1, steps=6)
    for update, step in ((5.0, 8.0), (20.0, 20.0)):
        found = ends(scale, costs(scale, update=update), load, scale.Fleet())
        assert [after - before for before, after in pairwise(found)] == [step] * 5


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_group_is_later_than_its_bound(scale: Any, ahead: int) -> None:
    uneven = costs(scale, tool=(0.0, 1.5), turns=(1, 2, 5), host=0.01, sync=0.1)
    world = scale.World(uneven, scale.Load(3, ahead=ahead, steps=9), scale.Fleet(engines=2), 1)
    assert max(world.lags) <= ahead and len(world.lags) == 27


def test_what_dies_begins_again(scale: Any) -> None:
    load = scale.Load(2, steps=4)
    whole = scale.World(costs(scale), load, scale.Fleet(), 0)
    for worse in (
        scale.World(costs(scale), replace(load, failures=0.3), scale.Fleet(), 0),
        scale.World(costs(scale), load, scale.Fleet(deaths=1 / 30, restart=5.0), 0),
        scale.World(costs(scale), replace(load, ahead=1), scale.Fleet(streams=True, deaths=1 / 20, restart=5.0), 0),
    ):
        assert len(worse.ends) == 4 and worse.calls > whole.calls == 32
