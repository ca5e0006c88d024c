"""Every kind of store against a second, naive account of the rules, over random requests.

The model knows nothing of `ajet/store/states.py`: lists, numbers and the rules as the documentation says them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from ajet.store.database_store import DatabaseStore
from ajet.store.records import AttemptedRollout, RolloutConfig, Span
from ajet.store.requests import AttemptRef, AttemptUpdate, ConflictError, NewRollout
from ajet.store.rollout_store import RolloutStore
from support.store_kinds import Clock, Opener

pytestmark = pytest.mark.anyio

STEPS = 100
WORKERS = ("w0", "w1", "w2")
ALIVE = ("preparing", "running")
ENDED = ("succeeded", "failed", "cancelled")
CONFIGS = (
    RolloutConfig(),
    RolloutConfig(max_attempts=2, retry_condition=("failed",)),
    RolloutConfig(unresponsive_seconds=10, max_attempts=3, retry_condition=("unresponsive",)),
    RolloutConfig(timeout_seconds=30, unresponsive_seconds=10, max_attempts=2, retry_condition=("timeout", "failed")),
    RolloutConfig(timeout_seconds=25, max_attempts=3, retry_condition=("failed", "timeout", "unresponsive")),
)


@dataclass
class Try:
    began: float
    heard: float
    worker: str | None
    status: str = "preparing"
    spans: set[str] = field(default_factory=set)
    result: Any = None


@dataclass
class Whole:
    config: RolloutConfig
    status: str = "queuing"
    ended: float | None = None
    tries: list[Try] = field(default_factory=list)


class Model:
    """Rollouts by number, in the order in which they were made."""

    def __init__(self) -> None:
        self.rollouts: list[Whole] = []
        self.queue: list[int] = []
        self.workers: dict[str, str] = {}

    def begin(self, number: int, worker: str | None, now: float) -> None:
        one = self.rollouts[number]
        if number in self.queue:
            self.queue.remove(number)
        one.tries.append(Try(now, now, worker))
        one.status, one.ended = "preparing", None
        if worker is not None:
            self.workers[worker] = "busy"

    def claim(self, worker: str, limit: int, now: float) -> list[int]:
        taken = self.queue[:limit]
        for number in taken:
            self.begin(number, worker, now)
        if not taken:
            self.workers[worker] = "idle"
        return taken

    def restart(self, number: int, worker: str | None, now: float) -> bool:
        one = self.rollouts[number]
        if one.status in ("succeeded", "cancelled"):
            return False
        if one.tries and one.tries[-1].status in ALIVE:
            one.tries[-1].status = "cancelled"
        self.begin(number, worker, now)
        return True

    def _counts(self, number: int, place: int) -> bool:
        """Whether news of this attempt still matter."""
        one = self.rollouts[number]
        if place != len(one.tries) - 1 or one.status in ENDED:
            return False
        status = one.tries[place].status
        return status in ALIVE or (status == "unresponsive" and number in self.queue)

    def hear(self, number: int, place: int, now: float, span: str | None = None) -> bool:
        """Whether it was a new span."""
        one = self.rollouts[number]
        this = one.tries[place]
        fresh = span is not None and span not in this.spans
        if span is not None:
            this.spans.add(span)
        if self._counts(number, place):
            this.heard = now
            if span is not None or this.status == "unresponsive":
                this.status = one.status = "running"
                if number in self.queue:
                    self.queue.remove(number)
        return fresh

    def report(self, number: int, place: int, status: str, result: Any, now: float) -> None:
        if not self._counts(number, place):
            return
        this = self.rollouts[number].tries[place]
        this.status, this.result = status, result
        if number in self.queue:
            self.queue.remove(number)
        if this.worker is not None:
            self.workers[this.worker] = "idle"
        self._over(number, now)

    def _over(self, number: int, now: float) -> None:
        one = self.rollouts[number]
        last = one.tries[-1].status
        if last == "succeeded":
            one.status, one.ended = "succeeded", now
        elif last in one.config.retry_condition and len(one.tries) < one.config.max_attempts:
            one.status = "requeuing"
            self.queue.append(number)
        else:
            one.status, one.ended = "failed", now

    def cancel(self, number: int, now: float) -> None:
        one = self.rollouts[number]
        if one.status in ENDED:
            return
        if number in self.queue:
            self.queue.remove(number)
        if one.tries and one.tries[-1].status in ALIVE:
            one.tries[-1].status = "cancelled"
        one.status, one.ended = "cancelled", now

    def watch(self, now: float) -> None:
        late: list[tuple[float, int, str]] = []
        for number, one in enumerate(self.rollouts):
            if not one.tries or one.tries[-1].status not in ALIVE:
                continue
            whole, silence = one.config.timeout_seconds, one.config.unresponsive_seconds
            this = one.tries[-1]
            if whole is not None and now - this.began >= whole:
                late.append((0.0, number, "timeout"))
            elif silence is not None and now - this.heard >= silence:
                late.append((0.0, number, "unresponsive"))
        for _, number, status in late:
            this = self.rollouts[number].tries[-1]
            this.status = status
            if this.worker is not None:
                self.workers[this.worker] = "unknown"
            self._over(number, now)


class Pair:
    """A store and its model, given the same requests."""

    def __init__(self, store: RolloutStore, behind: DatabaseStore, clock: Clock, seed: int) -> None:
        self.store, self.behind, self.clock = store, behind, clock
        self.random = random.Random(seed)
        self.model = Model()
        self.names: list[str] = []
        self.tries: dict[tuple[int, int], str] = {}
        self.log: list[str] = []

    def _begun(self, got: AttemptedRollout) -> int:
        number = self.names.index(got.rollout.rollout_id)
        assert got.attempt is not None
        assert got.attempt.sequence_id == len(self.model.rollouts[number].tries)
        self.tries[number, got.attempt.sequence_id - 1] = got.attempt.attempt_id
        return number

    def _any_try(self) -> tuple[int, int] | None:
        """Latest attempts more often than old ones."""
        if not self.tries:
            return None
        number, place = self.random.choice(sorted(self.tries))
        return (number, len(self.model.rollouts[number].tries) - 1) if self.random.random() < 0.7 else (number, place)

    async def enqueue(self) -> None:
        configs = self.random.choices(CONFIGS, k=self.random.randint(1, 3))
        rollouts = [NewRollout(input={"n": len(self.names) + i}, config=one) for i, one in enumerate(configs)]
        for config, got in zip(configs, await self.store.enqueue(rollouts), strict=True):
            self.model.queue.append(len(self.names))
            self.model.rollouts.append(Whole(config))
            self.names.append(got.rollout_id)

    async def start(self) -> None:
        config, worker = self.random.choice(CONFIGS), self.random.choice((None, *WORKERS))
        got = await self.store.start_rollout(NewRollout(input={"n": len(self.names)}, config=config), worker_id=worker)
        self.names.append(got.rollout.rollout_id)
        self.model.rollouts.append(Whole(config))
        self.model.begin(len(self.names) - 1, worker, self.clock.now)
        self._begun(got)

    async def claim(self) -> None:
        worker, limit = self.random.choice(WORKERS), self.random.randint(1, 3)
        got = await self.store.claim(worker, limit=limit)
        expected = self.model.claim(worker, limit, self.clock.now)
        assert sorted(map(self._begun, got)) == sorted(expected)
        assert [one.rollout.input["n"] for one in got] == expected

    async def restart(self) -> None:
        if not self.names:
            return
        number, worker = self.random.randrange(len(self.names)), self.random.choice((None, *WORKERS))
        if self.model.restart(number, worker, self.clock.now):
            self._begun(await self.store.start_attempt(self.names[number], worker_id=worker))
        else:
            with pytest.raises(ConflictError):
                await self.store.start_attempt(self.names[number], worker_id=worker)

    async def spans(self) -> None:
        chosen = [one for _ in range(self.random.randint(1, 3)) if (one := self._any_try()) is not None]
        spans, fresh = [], 0
        for number, place in chosen:
            name = f"s{self.random.randrange(6)}"
            fresh += self.model.hear(number, place, self.clock.now, name)
            reference = {"rollout_id": self.names[number], "attempt_id": self.tries[number, place]}
            spans.append(Span(**reference, span_id=name, name="call"))
        assert await self.store.add_spans(spans) == fresh

    async def heartbeat(self) -> None:
        chosen = [one for _ in range(2) if (one := self._any_try()) is not None]
        for number, place in chosen:
            self.model.hear(number, place, self.clock.now)
        references = [
            AttemptRef(rollout_id=self.names[number], attempt_id=self.tries[number, place]) for number, place in chosen
        ]
        answers = await self.store.heartbeat("beating", references)
        self.model.workers.setdefault("beating", "idle")
        assert [one.status for one in answers] == [
            self.model.rollouts[number].tries[place].status for number, place in chosen
        ]

    async def report(self) -> None:
        chosen = [one for _ in range(self.random.randint(1, 3)) if (one := self._any_try()) is not None]
        updates, expected = [], []
        for number, place in chosen:
            status = self.random.choice(("succeeded", "failed"))
            result = {"by": self.random.randrange(100)}
            self.model.report(number, place, status, result, self.clock.now)
            this = self.model.rollouts[number].tries[place]
            expected.append((this.status, this.result))
            reference = {"rollout_id": self.names[number], "attempt_id": self.tries[number, place]}
            updates.append(AttemptUpdate(**reference, status=status, result=result))  # type: ignore[arg-type]
        answers = await self.store.update_attempts(updates)
        assert [(str(one.status), one.result) for one in answers] == expected

    async def cancel(self) -> None:
        chosen = self.random.sample(range(len(self.names)), min(len(self.names), self.random.randint(1, 2)))
        for number in chosen:
            self.model.cancel(number, self.clock.now)
        answers = await self.store.cancel([self.names[number] for number in chosen])
        assert [str(one.status) for one in answers] == [self.model.rollouts[number].status for number in chosen]

    async def wait_a_while(self) -> None:
        self.clock.now += self.random.choice((1.0, 6.0, 11.0, 31.0))
        await self.behind.expire_overdue()
        before = list(self.model.queue)
        self.model.watch(self.clock.now)
        fresh = [number for number in self.model.queue if number not in before]
        if len(fresh) > 1:  # ended in one look: in which order they queue again is the store's to choose
            chosen = await self._queued_behind(before)
            assert sorted(chosen) == sorted(fresh)
            self.model.queue = before + chosen

    async def _queued_behind(self, before: list[int]) -> list[int]:
        def look(tables: Any) -> list[str]:
            return [one.rollout.rollout_id for one in tables.head_of_queue(1000)]

        queued = [self.names.index(name) for name in await self.behind.tables(look)]
        assert queued[: len(before)] == before
        return queued[len(before) :]

    async def compare(self) -> None:
        page = await self.store.query_rollouts(limit=1000)
        assert page.total == len(self.names)
        for number, (one, got) in enumerate(zip(self.model.rollouts, page.items, strict=True)):
            latest = one.tries[-1].status if one.tries else None
            assert (got.rollout.rollout_id, str(got.rollout.status)) == (self.names[number], one.status)
            assert got.rollout.end_time == one.ended
            assert (None if got.attempt is None else str(got.attempt.status)) == latest
        ended = await self.store.wait(self.names, timeout=0)
        assert {one.rollout.rollout_id for one in ended} == {
            name for name, one in zip(self.names, self.model.rollouts, strict=True) if one.status in ENDED
        }
        workers = (await self.store.query_workers(limit=100)).items
        assert {one.worker_id: str(one.status) for one in workers} == self.model.workers

    async def compare_attempts(self) -> None:
        for number, one in enumerate(self.model.rollouts):
            got = await self.store.query_attempts(self.names[number])
            assert [(str(each.status), each.result) for each in got] == [
                (each.status, each.result) for each in one.tries
            ]
            for place, each in enumerate(one.tries):
                spans = (await self.store.query_spans(self.names[number], self.tries[number, place])).items
                assert {span.span_id for span in spans} == each.spans
            every = (await self.store.query_spans(self.names[number])).items
            assert len({span.sequence_id for span in every}) == len(every)

    async def run(self) -> None:
        actions: list[Callable[[], Any]] = [
            self.enqueue, self.start, self.restart, self.cancel, self.wait_a_while, self.heartbeat,
            *[self.claim] * 3, *[self.spans] * 2, *[self.report] * 2,
        ]  # fmt: skip
        for _ in range(STEPS):
            action = self.random.choice(actions)
            self.log.append(action.__name__)
            await action()
            await self.compare()
        await self.compare_attempts()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_a_store_does_what_the_model_does(kind: Opener, seed: int) -> None:
    clock = Clock()
    async with kind.open(clock) as (store, behind):
        await Pair(store, behind, clock, seed).run()
