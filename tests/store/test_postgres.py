"""What only PostgreSQL has: several servers of one database, connections that are cut, a wrong address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ajet.store.database_store import postgres_store
from ajet.store.requests import NewRollout, StoreError, StoreUnavailableError
from support.store_kinds import fresh_database

pytestmark = pytest.mark.anyio


async def test_two_servers_share_a_queue_and_wake_each_others_clients(postgres: Callable[[], str]) -> None:
    url = fresh_database(postgres())

    async with asyncio.timeout(60), postgres_store(url) as here, postgres_store(url) as there:
        claiming = asyncio.create_task(there.claim("w", wait_seconds=30))
        while not there.waiting._claimers:
            await asyncio.sleep(0.005)
        (rollout,) = await here.enqueue([NewRollout(input=1)])
        (claimed,) = await claiming
        waiting = asyncio.create_task(here.wait([rollout.rollout_id], 30))
        assert claimed.attempt is not None
        await there.report(rollout.rollout_id, claimed.attempt.attempt_id, "succeeded")
        (ended,) = await waiting
        assert ended.rollout.status == "succeeded"


async def test_connections_that_are_cut_are_made_anew(postgres: Callable[[], str]) -> None:
    import psycopg

    url = fresh_database(postgres())

    async with asyncio.timeout(60), postgres_store(url) as store:
        await store.enqueue([NewRollout(input=1)])
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        for _ in range(20):  # each cut connection is noticed once
            try:
                assert (await store.query_rollouts()).total == 1
                break
            except StoreUnavailableError as error:
                assert "Nothing was stored" in str(error)
        claiming = asyncio.create_task(store.claim("w", limit=5, wait_seconds=30))
        assert len(await claiming) == 1
        waiting = asyncio.create_task(store.claim("w", wait_seconds=30))
        await asyncio.sleep(0)
        await store.enqueue([NewRollout(input=2)])
        assert len(await waiting) == 1, "it listens again"


async def test_two_servers_may_start_at_the_same_moment(postgres: Callable[[], str]) -> None:
    url = fresh_database(postgres())

    stores = [postgres_store(url) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].enqueue([NewRollout(input=1)])
    assert (await stores[3].query_rollouts()).total == 1
    await asyncio.gather(*(store.aclose() for store in stores))


def test_a_wrong_address_is_told_without_the_password() -> None:
    pytest.importorskip("psycopg")
    url = "postgresql://me:secret@127.0.0.1:1/none"
    with pytest.raises(StoreError, match=r"--postgres: can't use .*127\.0\.0\.1") as refused:
        asyncio.run(postgres_store(url).open())
    assert "secret" not in str(refused.value)


async def test_a_closed_store_refuses(postgres: Callable[[], str]) -> None:
    url = fresh_database(postgres())

    async with postgres_store(url) as store:
        pass
    with pytest.raises(StoreUnavailableError, match="closed"):
        await store.statistics()
