"""What every kind of store does, and its HTTP client: one suite for all of them."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest

from ajet.observe.tracing import NOT_COUNTED, get_reward_value
from ajet.store import requests as ask
from ajet.store.context import Context
from ajet.store.database_store import DatabaseStore, Retention, memory_store
from ajet.store.operations import carry_out, delete_old
from ajet.store.records import AttemptedRollout, RolloutConfig, RolloutStatus, Span
from ajet.store.requests import AttemptRef, AttemptUpdate, ConflictError, NewRollout, Role, StoreError, UnknownIdError
from ajet.store.rollout_store import RolloutStore
from ajet.store.server import issue, listed
from ajet.store.tables import Tables
from support.store_kinds import Clock, Opener

pytestmark = pytest.mark.anyio

RETRIES = RolloutConfig(
    max_attempts=3,
    retry_condition=("failed", "timeout", "unresponsive"),
    timeout_seconds=100,
    unresponsive_seconds=10,
)


def new(number: int = 0, **options: Any) -> NewRollout:
    return NewRollout(input={"number": number}, **options)


def ids(claimed: AttemptedRollout) -> tuple[str, str]:
    assert claimed.attempt is not None
    return claimed.rollout.rollout_id, claimed.attempt.attempt_id


def span(claimed: AttemptedRollout, span_id: str, **options: Any) -> Span:
    rollout_id, attempt_id = ids(claimed)
    return Span(**{"rollout_id": rollout_id, "attempt_id": attempt_id, "span_id": span_id, "name": "call", **options})


async def claim_one(store: RolloutStore, worker: str = "w") -> AttemptedRollout:
    (claimed,) = await store.claim(worker, wait_seconds=20)
    return claimed


async def test_a_rollout_from_queue_to_success(kind: Opener) -> None:
    async with kind.open() as (store, _):
        rollout = await store.enqueue_one({"q": "2 + 2?"}, mode="train", metadata={"epoch": 1})
        assert rollout.status is RolloutStatus.QUEUING
        claimed = await claim_one(store)
        assert claimed.rollout.input == {"q": "2 + 2?"}
        assert claimed.rollout.status is RolloutStatus.PREPARING
        assert await store.add_spans([span(claimed, "a"), span(claimed, "b")]) == 2
        assert (await store.get_rollout(rollout.rollout_id)).rollout.status is RolloutStatus.RUNNING
        attempt = await store.report(*ids(claimed), "succeeded", {"reward": 1.0})
        assert (attempt.status, attempt.result) == ("succeeded", {"reward": 1.0})
        (done,) = await store.wait([rollout.rollout_id])
        assert done.rollout.status is RolloutStatus.SUCCEEDED
        assert done.attempt == attempt
        assert [one.sequence_id for one in (await store.query_spans(rollout.rollout_id)).items] == [1, 2]
        statistics = await store.statistics()
        assert statistics.rollouts == {"succeeded": 1}
        assert statistics.workers == {"idle": 1}


async def test_the_queue_is_first_in_first_out(kind: Opener) -> None:
    async with kind.open() as (store, _):
        await store.enqueue([new(0), new(1)])
        await store.enqueue([new(2)])
        claimed = await store.claim("w", limit=2) + await store.claim("w", limit=5)
        assert [one.rollout.input["number"] for one in claimed] == [0, 1, 2]
        assert await store.claim("w") == []


async def test_a_failed_attempt_goes_to_the_tail_once(kind: Opener) -> None:
    async with kind.open() as (store, _):
        await store.enqueue([new(0, config=RETRIES), new(1, config=RETRIES)])
        first = await claim_one(store)
        await store.report(*ids(first), "failed")
        await store.report(*ids(first), "failed")
        assert [(await claim_one(store)).rollout.input["number"] for _ in range(2)] == [1, 0]
        assert await store.claim("w") == []
        attempts = await store.query_attempts(first.rollout.rollout_id)
        assert [(one.sequence_id, one.status) for one in attempts] == [(1, "failed"), (2, "preparing")]


async def test_silence_costs_the_lease_and_overtime_ends_an_attempt(kind: Opener) -> None:
    clock = Clock()
    async with kind.open(clock) as (store, behind):
        await store.enqueue([new(0, config=RETRIES)])
        silent = await claim_one(store, "silent")
        clock.now += 9
        await store.heartbeat("silent", [AttemptRef(rollout_id=ids(silent)[0], attempt_id=ids(silent)[1])])
        clock.now += 9
        await behind.expire_overdue()
        assert await store.claim("other") == []
        clock.now += 2
        await behind.expire_overdue()
        assert {worker.worker_id: worker.status for worker in (await store.query_workers()).items}[
            "silent"
        ] == "unknown"
        slow = await claim_one(store, "slow")
        for _ in range(11):
            clock.now += 9.5
            answer = await store.heartbeat("slow", [AttemptRef(rollout_id=ids(slow)[0], attempt_id=ids(slow)[1])])
            await behind.expire_overdue()
        assert answer[0].status in ("running", "preparing", "timeout")
        attempts = await store.query_attempts(ids(slow)[0])
        assert [one.status for one in attempts] == ["unresponsive", "timeout"]
        assert [one.end_time for one in attempts] == [None, clock.now]
        late = await store.report(*ids(slow), "succeeded", "late")
        assert (late.status, late.result) == ("timeout", None)
        assert (await store.get_rollout(ids(slow)[0])).rollout.status is RolloutStatus.REQUEUING


async def test_news_of_an_older_attempt_change_nothing(kind: Opener) -> None:
    clock = Clock()
    async with kind.open(clock) as (store, behind):
        await store.enqueue([new(0, config=RETRIES)])
        old = await claim_one(store, "old")
        clock.now += 11
        await behind.expire_overdue()
        latest = await claim_one(store, "new")
        assert await store.add_spans([span(old, "late")]) == 1
        answer = await store.report(*ids(old), "succeeded", {"reward": 1.0})
        assert (answer.status, answer.result) == ("unresponsive", None)
        (status,) = await store.heartbeat("old", [AttemptRef(rollout_id=ids(old)[0], attempt_id=ids(old)[1])])
        assert status.status == "unresponsive"
        assert (await store.get_rollout(ids(old)[0])).rollout.status is RolloutStatus.PREPARING
        assert (await store.report(*ids(latest), "succeeded")).status == "succeeded"
        spans = await store.query_spans(ids(old)[0], "latest")
        assert spans.items == []
        assert (await store.query_spans(ids(old)[0], ids(old)[1])).total == 1


async def test_an_unresponsive_attempt_that_speaks_again_leaves_the_queue(kind: Opener) -> None:
    clock = Clock()
    async with kind.open(clock) as (store, behind):
        await store.enqueue([new(0, config=RETRIES)])
        claimed = await claim_one(store)
        clock.now += 11
        await behind.expire_overdue()
        await store.add_spans([span(claimed, "again")])
        assert await store.claim("other") == []
        assert (await store.report(*ids(claimed), "succeeded")).status == "succeeded"


async def test_cancelled_stays_cancelled(kind: Opener) -> None:
    async with kind.open() as (store, _):
        running, waiting = await store.enqueue([new(0), new(1)])
        claimed = await claim_one(store)
        cancelled = await store.cancel([running.rollout_id, waiting.rollout_id])
        assert [one.status for one in cancelled] == ["cancelled", "cancelled"]
        assert await store.claim("w") == []
        assert (await store.report(*ids(claimed), "succeeded")).status == "cancelled"
        (told,) = await store.heartbeat("w", [AttemptRef(rollout_id=ids(claimed)[0], attempt_id=ids(claimed)[1])])
        assert told.status == "cancelled"
        assert (await store.get_rollout(running.rollout_id)).rollout.status is RolloutStatus.CANCELLED
        with pytest.raises(ConflictError, match="cancelled"):
            await store.start_attempt(running.rollout_id)


async def test_what_is_returned_is_a_copy(kind: Opener) -> None:
    async with kind.open() as (store, _):
        given = {"messages": ["hi"]}
        rollout = await store.enqueue_one(given)
        given["messages"].append("changed")
        rollout.input["messages"].append("changed")
        rollout.metadata["changed"] = True
        (await store.get_rollout(rollout.rollout_id)).rollout.input["messages"].append("changed")
        claimed = await claim_one(store)
        assert claimed.attempt is not None
        for returned in (claimed.rollout, claimed.attempt):
            returned.metadata["changed"] = True
        attributes = {"names": ["a"]}
        await store.add_spans([span(claimed, "a", attributes=attributes)])
        attributes["names"].append("changed")
        (await store.query_spans(rollout.rollout_id)).items[0].attributes["names"].append("changed")
        result = {"rewards": [1.0]}
        reported = await store.report(*ids(claimed), "succeeded", result)
        result["rewards"].append(2.0)
        reported.result["rewards"].append(3.0)
        (await store.query_attempts(rollout.rollout_id))[0].metadata["changed"] = True
        resources = await store.publish_resources({"prompt": {"text": "hi"}}, resources_id="r")
        resources.resources["prompt"]["text"] = "changed"

        kept = await store.get_rollout(rollout.rollout_id)
        assert kept.attempt is not None
        assert (kept.rollout.input, kept.rollout.metadata) == ({"messages": ["hi"]}, {})
        assert (kept.attempt.result, kept.attempt.metadata) == ({"rewards": [1.0]}, {})
        assert (await store.query_spans(rollout.rollout_id)).items[0].attributes == {"names": ["a"]}
        latest = await store.latest_resources()
        assert latest is not None
        assert latest.resources == {"prompt": {"text": "hi"}}


async def test_what_raises_undoes_all_that_it_did(kind: Opener) -> None:
    clock = Clock()

    async def everything(store: RolloutStore, behind: DatabaseStore) -> list[Any]:
        rollouts = await store.query_rollouts(descending=True)
        spans = [await store.query_spans(one.rollout.rollout_id) for one in rollouts.items]
        rest = [await store.query_resources(), await store.query_workers(), await store.statistics()]
        return [rollouts, *spans, *rest, await behind.tables(listed), await behind.expire_overdue()]

    async with kind.open(clock) as (store, behind):
        limits = RolloutConfig(unresponsive_seconds=100)
        queued = await store.enqueue([new(n, config=limits) for n in range(6)])
        ended, running = await store.claim("w", limit=2)
        await store.report(*ids(ended), "succeeded", {"reward": 1.0})
        await store.publish_resources({"prompt": "a"}, resources_id="r")
        before = await everything(store, behind)

        def work(tables: Tables) -> None:
            context = Context(tables, clock(), 0.0)
            (claimed,) = carry_out(ask.Claim(worker_id="w2", request_id="again"), context)
            carry_out(ask.AddSpans(spans=[span(claimed, "a"), span(running, "a")]), context)
            rollout_id, attempt_id = ids(running)
            update = AttemptUpdate(rollout_id=rollout_id, attempt_id=attempt_id, status="failed", result=2)
            carry_out(ask.UpdateAttempts(updates=[update]), context)
            carry_out(ask.Cancel(rollout_ids=[queued[4].rollout_id]), context)
            carry_out(ask.UpdateRollout(rollout_id=queued[5].rollout_id, input=7), context)
            carry_out(ask.Enqueue(rollouts=[new(9)], request_id="again"), context)
            carry_out(ask.PublishResources(resources={}, resources_id="r"), context)
            issue(tables, "new", [Role.READER])
            tables.forget_requests(clock() + 1)
            delete_old(context, keep_seconds=0, keep_bytes=None)
            raise LookupError("no more")

        with pytest.raises(LookupError):
            await behind.tables(work)
        assert await everything(store, behind) == before
        assert len(await store.enqueue([new(9)], request_id="again")) == 1
        left = [one.rollout.input["number"] for one in await store.claim("w", limit=10, request_id="again")]
        assert left == [2, 3, 4, 5, 9], "the queue is as it was"


async def test_unknown_ids_are_clear_errors(kind: Opener) -> None:
    async with kind.open() as (store, _):
        known = (await store.enqueue_one(1)).rollout_id
        claimed = await claim_one(store)
        for asked in (
            store.get_rollout("ro-none"),
            store.wait([known, "ro-none"]),
            store.cancel(["ro-none"]),
            store.query_spans("ro-none"),
            store.query_attempts("ro-none"),
            store.start_attempt("ro-none"),
            store.update_rollout("ro-none", metadata={}),
            store.add_spans([span(claimed, "a", rollout_id="ro-none")]),
            store.report("ro-none", "at-none", "succeeded"),
        ):
            with pytest.raises(UnknownIdError, match="no rollout 'ro-none' in this store"):
                await asked
        with pytest.raises(UnknownIdError, match=f"{known} has no attempt 'at-none'"):
            await store.report(known, "at-none", "succeeded")
        with pytest.raises(UnknownIdError, match="no resources 'rs-none'"):
            await store.enqueue([new(resources_id="rs-none")])
        with pytest.raises(UnknownIdError, match="rs-none"):
            await store.query_resources(resources_id="rs-none")


async def test_a_repeated_request_is_answered_like_the_first(kind: Opener) -> None:
    async with kind.open() as (store, _):
        first = await store.enqueue([new(0), new(1)], request_id="enqueue-1")
        assert await store.enqueue([new(0), new(1)], request_id="enqueue-1") == first
        claimed = await store.claim("w", request_id="claim-1")
        assert await store.claim("w", request_id="claim-1") == claimed
        assert len(await store.claim("w", limit=10)) == 1
        assert await store.add_spans([span(claimed[0], "a")]) == 1
        assert await store.add_spans([span(claimed[0], "a"), span(claimed[0], "b")]) == 1
        await store.report(*ids(claimed[0]), "succeeded")
        assert await store.claim("w", request_id="claim-1") == [], "it has ended: nobody should run it again"
        resources = await store.publish_resources({"prompt": "x"}, request_id="p")
        assert await store.publish_resources({"prompt": "x"}, request_id="p") == resources
        started = await store.start_rollout(new(7), request_id="s")
        assert await store.start_rollout(new(7), request_id="s") == started
        assert (await store.query_rollouts()).total == 3


async def test_the_same_request_twice_at_once_is_done_once(kind: Opener) -> None:
    async with kind.open() as (store, _):
        answers = await asyncio.gather(*(store.enqueue([new(n) for n in range(3)], request_id="x") for _ in range(6)))
        assert all(answer == answers[0] for answer in answers)
        claims = await asyncio.gather(*(store.claim("w", limit=2, request_id="y") for _ in range(6)))
        got = [claim for claim in claims if claim]  # some may find nothing while another takes all
        assert all(claim == got[0] for claim in got)
        taken = len(got[0])
        assert 1 <= taken <= 2
        assert (await store.statistics()).rollouts == {"queuing": 3 - taken, "preparing": taken}


async def test_no_rollout_goes_to_two_claims(kind: Opener) -> None:
    async with kind.open() as (store, _):
        await store.enqueue([new(n) for n in range(60)])
        claims = await asyncio.gather(*(store.claim(f"w{n}", limit=4) for n in range(20)))
        numbers = [one.rollout.input["number"] for claim in claims for one in claim]
        assert sorted(numbers) == list(range(60))


async def test_a_claim_waits_for_work(kind: Opener) -> None:
    async with kind.open() as (store, behind):
        waiting = [asyncio.create_task(store.claim(f"w{n}", wait_seconds=30)) for n in range(5)]
        while (await store.query_workers()).total < 5:  # each has looked at the empty queue
            await asyncio.sleep(0.005)
        in_line = set(behind.waiting._claimers)
        await store.enqueue([new(0), new(1)])
        done, rest = set[Any](), set(waiting)
        while len(done) < 2:
            done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert sorted(claimed.rollout.input["number"] for task in done for claimed in task.result()) == [0, 1]
        assert len(in_line.difference(behind.waiting._claimers)) <= 3, "each rollout wakes one claimer"
        assert len(rest) == 3
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


async def test_a_turn_that_comes_with_the_end_of_a_claim_is_the_next_one_s() -> None:
    async with asyncio.timeout(60), memory_store() as store:
        claims = [asyncio.create_task(store.claim(name, wait_seconds=wait)) for name, wait in (("a", 1), ("b", 50))]
        while (await store.query_workers()).total < 2:  # each has looked at the empty queue
            await asyncio.sleep(0.005)
        queued = asyncio.create_task(store.enqueue([new(0)]))
        for _ in range(3):
            await asyncio.sleep(0)  # it is under way
        time.sleep(1.1)  # the loop then learns of it and of the first claim's end at once
        async with asyncio.timeout(20):
            (claimed,) = await claims[0] or await claims[1]
        assert [claimed.rollout.rollout_id] == [one.rollout_id for one in await queued]


async def test_a_claim_that_waits_in_vain_returns_nothing(kind: Opener) -> None:
    async with kind.open() as (store, _):
        assert await store.claim("w", wait_seconds=0.05) == []
        assert [worker.status for worker in (await store.query_workers()).items] == ["idle"]


async def test_a_turn_that_is_not_taken_goes_to_the_next_claimer(kind: Opener) -> None:
    async with kind.open() as (store, behind):
        tasks = [asyncio.create_task(store.claim(f"w{n}", wait_seconds=30)) for n in range(2)]
        while len(behind.waiting._claimers) < 2:
            await asyncio.sleep(0.005)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        await store.enqueue([new(0), new(1)])
        claimed = await tasks[1] + await store.claim("w2", wait_seconds=10)
        assert len(claimed) >= 1


async def test_waiting_for_64_rollouts_costs_one_wake_up(kind: Opener) -> None:
    async with kind.open() as (store, behind):
        rollouts = await store.enqueue([new(n) for n in range(64)])
        waiting = asyncio.create_task(store.wait([one.rollout_id for one in rollouts], timeout=30))
        while not behind.waiting._by_rollout:
            await asyncio.sleep(0.005)
        (wait,) = {wait for waits in behind.waiting._by_rollout.values() for wait in waits}
        *most, last = await store.claim("w", limit=64)
        for claimed in most:
            await store.report(*ids(claimed), "succeeded")
        assert not wait.done.done()
        await store.report(*ids(last), "succeeded")
        assert len(await waiting) == 64


async def test_a_wait_that_runs_out_returns_those_that_have_ended(kind: Opener) -> None:
    async with kind.open() as (store, _):
        rollouts = await store.enqueue([new(0), new(1)])
        wanted = [one.rollout_id for one in rollouts]
        assert await store.wait(wanted, timeout=0) == []
        await store.report(*ids(await claim_one(store)), "failed")
        (ended,) = await store.wait(wanted, timeout=0.05)
        assert ended.rollout.status is RolloutStatus.FAILED


async def test_a_timeout_that_is_no_number_is_refused(kind: Opener) -> None:
    async with kind.open() as (store, _):
        one = await store.enqueue_one(1)
        with pytest.raises(StoreError, match="wait: timeout is nan"):
            await store.wait([one.rollout_id], timeout=math.nan)
        assert await store.wait([one.rollout_id], timeout=-1) == []


async def test_only_finite_numbers_are_stored(kind: Opener) -> None:
    async with kind.open() as (store, _):
        await store.enqueue_one(1)
        claimed = await claim_one(store)
        for value in (math.nan, math.inf):
            with pytest.raises(StoreError, match="reward"):
                await store.add_spans([span(claimed, "a", attributes={"agentlightning.reward.0.value": value})])
        with pytest.raises(StoreError, match=r"input\.x\[1\] is nan"):
            await store.enqueue_one({"x": [1.0, math.nan]})
        with pytest.raises(StoreError, match=r"result is inf"):
            await store.report(*ids(claimed), "succeeded", math.inf)
        assert await store.add_spans([span(claimed, "b", attributes={"reward": np.float32(0.5)})]) == 1
        assert (await store.query_spans(ids(claimed)[0])).items[0].attributes == {"reward": 0.5}


async def test_any_attribute_is_stored_and_only_emitted_numbers_are_rewards(kind: Opener) -> None:
    async with kind.open() as (store, _):
        await store.enqueue_one(1)
        claimed = await claim_one(store)
        texts = [
            span(claimed, "a", name="reward", attributes={"reward": "well done", "x.reward.0.value": None}),
            span(claimed, "b", name="agentlightning.reward", attributes={"agentlightning.reward.0.value": "1"}),
            span(claimed, "c", name="agentlightning.reward", attributes={"agentlightning.reward.0.value": 0.5}),
            span(claimed, "d", name="agentlightning.reward", attributes={"reward": 0.25}),
        ]
        assert await store.add_spans(texts) == 4, "one that is wrong costs the others nothing"
        kept = (await store.query_spans(ids(claimed)[0])).items
        assert kept[0].attributes == texts[0].attributes
        assert "must be a finite number" in kept[1].attributes[NOT_COUNTED]
        assert [get_reward_value(one) for one in kept] == [None, None, 0.5, 0.25]


async def test_spans_beyond_one_request_are_added(kind: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet.store.requests.MAX_BATCH", 4)
    async with kind.open() as (store, _):
        await store.enqueue_one(1)
        claimed = await claim_one(store)
        assert await store.add_spans([span(claimed, str(number)) for number in range(9)]) == 9
        kept = (await store.query_spans(ids(claimed)[0])).items
        assert [one.span_id for one in kept] == [str(number) for number in range(9)]


async def test_what_is_no_data_is_refused(kind: Opener) -> None:
    endless: list[Any] = []
    endless.append(endless)
    async with kind.open() as (store, _):
        with pytest.raises(StoreError, match="object is not data"):
            await store.enqueue_one(object())
        with pytest.raises(StoreError, match="recursion depth"):
            await store.enqueue_one(endless)
        with pytest.raises(StoreError, match=r"no rollout 'with\\nbreak'"):
            await store.wait(["with\nbreak"])
        with pytest.raises(StoreError, match="limit"):
            await store.claim("w", limit=0)
        with pytest.raises(StoreError, match="max_attempts"):
            await store.enqueue_one(1, config=RolloutConfig(max_attempts=0))


async def test_spans_are_numbered_by_the_store_or_by_the_runner(kind: Opener) -> None:
    async with kind.open() as (store, _):
        await store.enqueue_one(1)
        claimed = await claim_one(store)
        rollout_id = ids(claimed)[0]
        assert await store.next_sequence_ids(rollout_id, 2) == [1, 2]
        await store.add_spans([span(claimed, "third"), span(claimed, "first", sequence_id=1, parent_id="third")])
        await store.add_spans([span(claimed, "ninth", sequence_id=9, name="tool call"), span(claimed, "tenth")])
        page = await store.query_spans(rollout_id)
        assert [(one.span_id, one.sequence_id) for one in page.items] == [
            ("first", 1), ("third", 3), ("ninth", 9), ("tenth", 10),
        ]  # fmt: skip
        assert [one.span_id for one in (await store.query_spans(rollout_id, name="tool call")).items] == ["ninth"]
        assert [one.span_id for one in (await store.query_spans(rollout_id, name_contains="tool")).items] == ["ninth"]
        assert [one.span_id for one in (await store.query_spans(rollout_id, parent_id="third")).items] == ["first"]
        part = await store.query_spans(rollout_id, limit=2, offset=1)
        assert ([one.span_id for one in part.items], part.total) == (["third", "ninth"], 4)


async def test_resources_have_versions(kind: Opener) -> None:
    async with kind.open() as (store, _):
        assert await store.latest_resources() is None
        assert (await store.enqueue_one(1)).resources_id is None
        first = await store.publish_resources({"prompt": "a"})
        other = await store.publish_resources({"prompt": "b"}, resources_id="mine")
        again = await store.publish_resources({"prompt": "c"}, resources_id=first.resources_id)
        assert [one.version for one in (first, other, again)] == [1, 1, 2]
        assert await store.latest_resources() == again
        assert (await store.enqueue_one(1)).resources_id == first.resources_id
        assert (await store.enqueue([new(resources_id="mine")]))[0].resources_id == "mine"
        old = await store.query_resources(resources_id=first.resources_id, version=1)
        assert old.items[0].resources == {"prompt": "a"}
        assert (await store.query_resources()).total == 3


async def test_attempts_begun_by_hand(kind: Opener) -> None:
    async with kind.open() as (store, _):
        started = await store.start_rollout(new(5), worker_id="me")
        assert started.rollout.status is RolloutStatus.PREPARING
        assert await store.claim("w") == []
        again = await store.start_attempt(started.rollout.rollout_id)
        assert again.attempt is not None
        assert again.attempt.sequence_id == 2
        assert (await store.report(*ids(started), "succeeded")).status == "cancelled"
        await store.report(*ids(again), "failed")
        third = await store.start_attempt(started.rollout.rollout_id)
        assert third.rollout.end_time is None
        await store.report(*ids(third), "succeeded")
        with pytest.raises(ConflictError, match="succeeded"):
            await store.start_attempt(started.rollout.rollout_id)


async def test_updates_change_only_what_they_name(kind: Opener) -> None:
    async with kind.open() as (store, _):
        rollout = await store.enqueue_one({"a": 1}, mode="val", metadata={"m": 1})
        changed = await store.update_rollout(rollout.rollout_id, metadata={"m": 2}, mode=None)
        assert (changed.input, changed.metadata, changed.mode) == ({"a": 1}, {"m": 2}, None)
        rollout_id, attempt_id = ids(await claim_one(store))
        await store.update_attempts([AttemptUpdate(rollout_id=rollout_id, attempt_id=attempt_id, metadata={"k": 1})])
        found = await store.get_rollout(rollout_id)
        assert found.attempt is not None
        assert (found.attempt.metadata, found.attempt.status) == ({"k": 1}, "preparing")
        assert found.rollout.status is RolloutStatus.PREPARING


async def test_queries_filter_sort_and_page(kind: Opener) -> None:
    async with kind.open() as (store, _):
        rollouts = await store.enqueue([new(n) for n in range(5)])
        await store.cancel([rollouts[3].rollout_id])
        page = await store.query_rollouts(status_in=[RolloutStatus.QUEUING], descending=True, limit=2, offset=1)
        assert (page.total, [one.rollout.input["number"] for one in page.items]) == (4, [2, 1])
        assert (await store.query_rollouts(id_contains="%")).total == 0
        assert (await store.query_rollouts(id_contains=rollouts[0].rollout_id[5:])).total == 1
        assert (await store.query_rollouts(rollout_ids=[])).total == 0


async def test_old_rollouts_are_deleted_but_never_running_ones(kind: Opener) -> None:
    clock = Clock()
    async with kind.open(clock) as (store, behind):
        rollouts = await store.enqueue([new(n) for n in range(4)])
        for claimed in await store.claim("w", limit=3):
            await store.add_spans([span(claimed, "a", attributes={"text": "x" * 1000})])
            if claimed.rollout.input["number"] < 2:
                clock.now += 1
                await store.report(*ids(claimed), "succeeded")
        behind._retention = Retention(keep_bytes=2000)
        assert await behind.delete_old() == 2
        left = await store.query_rollouts()
        assert [one.rollout.rollout_id for one in left.items] == [one.rollout_id for one in rollouts[2:]]
        clock.now += 9
        behind._retention = Retention(keep_seconds=10)
        assert await behind.delete_old() == 0, "one runs, one is queued"
        with pytest.raises(UnknownIdError, match="deleted to make room"):
            await store.wait([rollouts[0].rollout_id])


async def test_what_is_replaced_takes_no_room(kind: Opener) -> None:
    async with kind.open() as (store, _):
        rollout = await store.enqueue_one("x" * 1000)
        claimed = await claim_one(store)
        rollout_id, attempt_id = ids(claimed)
        begun = (await store.statistics()).stored_bytes
        for number in range(1, 4):
            await store.update_rollout(rollout.rollout_id, input="y" * 5000)
            metadata = {"k": "z" * 1000}
            await store.update_attempts(
                [AttemptUpdate(rollout_id=rollout_id, attempt_id=attempt_id, metadata=metadata)]
            )
            assert 5000 <= (await store.statistics()).stored_bytes - begun <= 5010, number


async def test_the_watchdog_runs_by_itself(kind: Opener) -> None:
    async with kind.open() as (store, _):
        config = RolloutConfig(unresponsive_seconds=0.2, max_attempts=2, retry_condition=("unresponsive",))
        await store.enqueue([new(0, config=config)])
        first = await claim_one(store, "dies")
        again = await store.claim("lives", wait_seconds=20)
        assert again[0].rollout.rollout_id == first.rollout.rollout_id
