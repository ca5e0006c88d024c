"""Synchronous, one-step-ahead and asynchronous training from 1 to 1,000 accelerators: measured, checked, predicted.

    python benchmarks/scale.py [measure | check | predict]

Nothing named: all three, some minutes. `measure` trains for real (`_scale_runs.py`) and fits the simulator's constants.
`check` makes three runs that it was not fitted on and compares the seconds of a step. `predict` is simulation alone, in
which an accelerator is as fast as a core of this machine was with a tiny model.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from _scale_runs import CHECKED, FITTED, REPEAT, Costs, Load, conduct_all, fit, saturation
from common import known_figures, write_result


@dataclass(frozen=True)
class Fleet:
    engines: int = 1
    trainers: int = 1
    gateways: int = 1
    streams: bool = False
    """Each update takes the groups that ended first, and weights change while replies pause (verl's asynchronous
    trainers). Otherwise a batch begins when the one before has ended, and an update waits for the replies in flight."""
    shared: bool = False
    """The trainer is in the process that runs the episodes."""
    slots: int = 64
    """Episodes at a time, and replies, per engine."""
    deaths: float = 0.0
    """Of an engine, per second. It is back after `restart` seconds."""
    restart: float = 60.0


Then = Callable[[], None]
Process = Generator[float | Callable[[Then], None], None, None]
"""Yields the seconds that it waits, or a function that is given what to call when it goes on."""


class Engine:
    def __init__(self, world: World) -> None:
        self.world, self.at, self.sampled, self.stall, self.plan = world, 0.0, 0.0, 0.0, 0
        self.flying: list[tuple[float, int, Then]] = []
        """By how many tokens each reply in flight will have been given when it ends."""
        self.waiting: deque[tuple[int, int, int, Then]] = deque()

    def pace(self) -> float:
        return self.world.costs.decode + self.world.costs.decode_each * len(self.flying)

    def ask(self, name: int, fresh: int, tokens: int, then: Then) -> None:
        self.waiting.append((name, fresh, tokens, then))
        self.go_on()

    def go_on(self, plan: int | None = None) -> None:
        """Bring it up to now, begin what waits, and plan for the next end of a reply."""
        if plan not in (None, self.plan):
            return
        world = self.world
        gone, self.at = world.now - self.at, world.now
        stalled = min(self.stall, gone)
        self.stall -= stalled
        self.sampled += (gone - stalled) / self.pace()
        ended = []
        while self.flying and self.flying[0][0] <= self.sampled + 1e-6:
            ended.append(heapq.heappop(self.flying)[2])
        while self.waiting and len(self.flying) < world.fleet.slots and not world.pausing:
            name, fresh, tokens, then = self.waiting.popleft()
            self.stall += world.costs.prefill * fresh
            heapq.heappush(self.flying, (self.sampled + tokens, name, then))
        self.plan += 1
        if self.flying:
            left = self.stall + max(0.0, self.flying[0][0] - self.sampled) * self.pace()
            world.after(left, partial(self.go_on, self.plan))
        for then in ended:
            then()
        if ended and world.pausing:
            world.look()

    def die(self) -> None:
        """The episodes whose replies are lost begin again."""
        self.go_on()
        lost, self.flying, self.stall = self.flying, [], self.stall + self.world.fleet.restart
        self.world.lost |= {name for _, name, _ in lost}
        for _, _, then in lost:
            then()


class World:
    """One run; `ends` are the seconds at which its steps ended, `lags` the versions by which its groups were late."""

    def __init__(self, costs: Costs, load: Load, fleet: Fleet, seed: int) -> None:
        self.costs, self.load, self.fleet, self.dice = costs, load, fleet, random.Random(seed)
        self.now, self.made, self.begun, self.version, self.out, self.calls = 0.0, 0, 0, 0, 0, 0
        self.training = self.pausing = False
        self.events: list[tuple[float, int, Then]] = []
        self.conditions: list[tuple[Callable[[], bool], Then]] = []
        self.engines = [Engine(self) for _ in range(fleet.engines)]
        self.free, self.queue = fleet.slots * fleet.engines, deque[Then]()
        self.hosts, self.lost = [0.0] * fleet.gateways, set[int]()
        self.ready: deque[tuple[int, int]] = deque()
        """Of groups that wait for their update: the version that they began with, and their tokens."""
        self.ends: list[float] = []
        self.lags: list[int] = []
        for process in (self.train(), self.draw(), *([self.doom()] if fleet.deaths else [])):
            self.resume(process)
        while len(self.ends) < load.steps:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def after(self, seconds: float, event: Then) -> None:
        self.made += 1
        heapq.heappush(self.events, (self.now + seconds, self.made, event))

    def resume(self, process: Process) -> None:
        asked = next(process, None)
        if callable(asked):
            asked(partial(self.resume, process))
        elif asked is not None:
            self.after(asked, partial(self.resume, process))

    def wait(self, condition: Callable[[], bool], then: Then) -> None:
        self.conditions.append((condition, then))
        self.look()

    def look(self) -> None:
        for waiter in [waiter for waiter in self.conditions if waiter[0]()]:
            self.conditions.remove(waiter)
            self.after(0.0, waiter[1])

    def draw(self) -> Process:
        for step in range(self.load.steps):
            oldest = step - self.load.ahead
            yield partial(self.wait, lambda: oldest <= self.version and (self.fleet.streams or not self.out))  # noqa: B023
            self.out += self.load.tasks
            for _ in range(self.load.tasks):
                group: list[int] = []
                for _ in range(REPEAT):
                    self.begun += 1
                    self.resume(self.episode(self.begun, group))

    def episode(self, name: int, group: list[int]) -> Process:
        costs, load, fleet, dice = self.costs, self.load, self.fleet, self.dice
        if not self.free:
            yield self.queue.append
        self.free -= 1
        version, ended = self.version, False
        while not ended:
            context, fresh = 0, costs.opening
            for _ in range(dice.choice(costs.turns)):
                self.calls += 1
                yield self.host(name % fleet.gateways)
                tokens = max(1, round(load.replies * dice.choice(costs.replies)))
                yield partial(self.engines[name % fleet.engines].ask, name, fresh, tokens)
                context, fresh = context + fresh + tokens, costs.turn
                if name in self.lost or dice.random() < load.failures:
                    self.lost.discard(name)
                    break
                own = dice.choice(costs.latency) + dice.choice(costs.between)
                yield own + load.tools * dice.lognormvariate(*costs.tool)
            else:
                ended = True
        self.free += 1
        if self.queue:
            self.after(0.0, self.queue.popleft())
        group.append(context)
        if len(group) == REPEAT:
            self.out -= 1
            self.ready.append((version, sum(group)))
            self.look()

    def host(self, gateway: int) -> float:
        """The seconds until a gateway's core has done a call's work, after what came before."""
        work = self.costs.host * (2 if self.training and self.fleet.shared else 1)
        self.hosts[gateway] = max(self.now, self.hosts[gateway]) + work
        return self.hosts[gateway] - self.now

    def train(self) -> Process:
        costs, load, fleet = self.costs, self.load, self.fleet
        for step in range(load.steps):
            yield partial(self.wait, lambda: len(self.ready) >= load.tasks)
            batch = [self.ready.popleft() for _ in range(load.tasks)]
            self.lags += [step - version for version, _ in batch]
            tokens = sum(group for _, group in batch)
            self.training = True
            beside = costs.slowed if fleet.shared and load.ahead else 1.0
            yield beside * (costs.update + costs.update_token * tokens / fleet.trainers)
            if fleet.streams:  # the contexts of what is in flight are computed again: on average half of each
                for engine in self.engines:
                    again = len(engine.flying) * tokens / (2 * REPEAT * load.tasks)
                    engine.go_on()
                    engine.stall += costs.sync + costs.prefill * again
                    engine.go_on()
            else:
                self.pausing = True
                yield partial(self.wait, lambda: not any(engine.flying for engine in self.engines))
            yield costs.sync
            self.pausing = self.training = False
            yield 0.0 if load.ahead else costs.rest
            self.version = step + 1
            for engine in self.engines:
                engine.go_on()
            self.look()
            yield costs.rest if load.ahead else 0.0
            self.ends.append(self.now)

    def doom(self) -> Process:
        while True:
            yield self.dice.expovariate(self.fleet.deaths * self.fleet.engines)
            self.dice.choice(self.engines).die()


def step_seconds(ends: Sequence[float], ahead: int) -> float:
    """The median step, without those in which a run begins to draw ahead, or no longer does."""
    return median(after - before for before, after in pairwise(ends[ahead + 1 : len(ends) - ahead]))


def check(costs: Costs, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, run in runs.items():
        load = run["load"]
        real = step_seconds([step["time"] for step in run["steps"]], load.ahead)
        said = median(step_seconds(World(costs, load, Fleet(shared=True), seed).ends, load.ahead) for seed in range(5))
        found[name] = {**asdict(load), "measured_s": real, "predicted_s": said, "off_percent": 100 * (said / real - 1)}
        print(f"{name}: {real:.2f} s a step, predicted {said:.2f} s, {found[name]['off_percent']:+.0f} %", flush=True)
    return found


EPISODES = 32
"""Of a batch, per accelerator. Replies are ten times as long as those measured, and tools twenty times as slow."""
AGENT = Load(0, replies=10.0, tools=20.0)
ACCELERATORS = (1, 4, 16, 64, 256, 1000)
MODES = {"synchronous": (0, False), "one ahead": (1, False), "four ahead": (4, False), "streaming": (1, True)}
"""How far each draws ahead, and whether updates take the groups that end first."""


def rate(
    costs: Costs, mode: str, devices: int, share: float, gateways: int, load: Load = AGENT, deaths: float = 0.0
) -> dict[str, float]:
    """Episodes trained per minute and accelerator. In synchronous training, all engines become trainers in turn."""
    ahead, streams = MODES[mode]
    trainers = max(1, round(devices * share)) if ahead else devices
    steps = min(24, max(3, 300 // devices)) + 2 * ahead
    load = replace(load, tasks=devices * EPISODES // REPEAT, ahead=ahead, steps=steps)
    fleet = Fleet(devices - trainers if ahead else devices, trainers, gateways, streams, deaths=deaths)
    world = World(costs, load, fleet, 0)
    each = 60 * EPISODES * (load.steps - 1 - 2 * ahead) / (world.ends[-1 - ahead] - world.ends[ahead])
    return {"episodes": each, "calls_per_s": world.calls / world.now, "latest": float(max(world.lags))}


def predict(costs: Costs) -> dict[str, Any]:
    """A gateway for eight accelerators, as `verl` has it; and all on one."""
    found: dict[str, Any] = {"share_of_trainers": {"synchronous": 1.0}, "per_minute_and_accelerator": {}}
    for mode in list(MODES)[1:]:
        shares = (0.25, 0.375, 0.5, 0.625)
        found["share_of_trainers"][mode] = max(shares, key=lambda share: rate(costs, mode, 16, share, 2)["episodes"])
    shares = found["share_of_trainers"]
    for devices in ACCELERATORS:
        modes = ["synchronous"] if devices == 1 else [mode for mode in MODES if devices < 1000 or mode != "four ahead"]
        row = {mode: rate(costs, mode, devices, shares[mode], -(-devices // 8)) for mode in modes}
        if 8 < devices < 1000:
            row["streaming, one gateway"] = rate(costs, "streaming", devices, shares["streaming"], 1)
        found["per_minute_and_accelerator"][devices] = row
        print(devices, {mode: round(value["episodes"], 1) for mode, value in row.items()}, flush=True)
    frail, quick = replace(AGENT, failures=0.05), replace(AGENT, tools=1.0)
    found["64, failing"] = {mode: rate(costs, mode, 64, shares[mode], 8, frail, deaths=1 / 3600) for mode in MODES}
    found["64, quick tools"] = {mode: rate(costs, mode, 64, shares[mode], 8, quick) for mode in MODES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("only", nargs="?", choices=("measure", "check", "predict"))
    only = parser.parse_args().only
    figures = known_figures("scale")
    runs = conduct_all({"measure": FITTED, "check": CHECKED, "predict": {}, None: FITTED | CHECKED}[only])
    if only in (None, "measure"):
        costs = fit(*(runs[name] for name in FITTED))
        figures["measured"] = {"per_core_and_second": saturation(), "costs": asdict(costs), "load": os.getloadavg()[1]}
    costs = Costs(**figures["measured"]["costs"])
    if only in (None, "check"):
        figures["checked"] = check(costs, {name: runs[name] for name in CHECKED})
    if only in (None, "predict"):
        figures["predicted"] = predict(costs)
    print(write_result("scale", figures))


if __name__ == "__main__":
    main()
