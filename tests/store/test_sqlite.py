"""A store in a file: killed, locked, damaged, of another version, full."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ajet.store.database_store import sqlite_store
from ajet.store.requests import NewRollout, StoreError, StoreUnavailableError
from ajet.store.rows import TABLES, VERSIONS, migrate

pytestmark = pytest.mark.anyio

WRITER = """
import asyncio, sys
from ajet.store.database_store import sqlite_store
from ajet.store.records import Span
from ajet.store.requests import NewRollout

async def write(store, number):
    while True:
        (rollout,) = await store.enqueue([NewRollout(input=number)])
        print("enqueued", rollout.rollout_id, flush=True)
        for one in await store.claim("w"):
            names = one.rollout.rollout_id, one.attempt.attempt_id
            await store.add_spans([Span(rollout_id=names[0], attempt_id=names[1], span_id="s", name="n")])
            print("span", names[0], flush=True)
            await store.report(*names, "succeeded")
            print("succeeded", names[0], flush=True)

async def main():
    async with sqlite_store(sys.argv[1]) as store:
        await asyncio.gather(*(write(store, number) for number in range(4)))

asyncio.run(main())
"""


def test_nothing_acknowledged_is_lost_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    told: dict[str, set[str]] = {"enqueued": set(), "span": set(), "succeeded": set()}
    for enough in (8, 30, 60):
        program = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert program.stdout is not None
        for count, line in enumerate(program.stdout):
            if not line.endswith("\n"):  # the kill came while it was written
                break
            what, rollout_id = line.split()
            told[what].add(rollout_id)
            if count == enough:
                os.kill(program.pid, signal.SIGKILL)
        program.wait()

    async def check() -> None:
        async with sqlite_store(path) as store:
            for rollout_id in told["enqueued"]:
                await store.get_rollout(rollout_id)
            for rollout_id in told["span"]:
                assert (await store.query_spans(rollout_id)).total == 1
            for rollout_id in told["succeeded"]:
                assert (await store.get_rollout(rollout_id)).rollout.status == "succeeded"
                assert len(await store.query_attempts(rollout_id)) == 1

    asyncio.run(check())
    assert told["succeeded"]


async def test_a_file_is_served_by_one_process(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "store.sqlite"):
        with pytest.raises(StoreError, match="another process is serving this store"):
            await sqlite_store(tmp_path / "store.sqlite").open()
    async with sqlite_store(tmp_path / "store.sqlite"):
        pass


@pytest.mark.parametrize("content", [b"no database", b"x" * 5000])
def test_a_file_that_is_no_store(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"store\.sqlite: not a store"):
        asyncio.run(sqlite_store(path).open())
    assert path.read_bytes() == content


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no folder"):
        asyncio.run(sqlite_store(tmp_path / "none" / "store.sqlite").open())
    with pytest.raises(StoreError, match=r"store\.sqlite: nothing can be written beside it: "):
        asyncio.run(sqlite_store("/proc/store.sqlite").open())


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=r"newer version of ajet .*99.*Update ajet here"):
        asyncio.run(sqlite_store(path).open())


@pytest.mark.parametrize("made", ["TRIGGER t AFTER INSERT ON rollout BEGIN SELECT 1; END", "VIEW v AS SELECT 1"])
async def test_a_store_from_elsewhere_brings_no_program(tmp_path: Path, made: str) -> None:
    path = tmp_path / "store.sqlite"
    async with sqlite_store(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE {made}")
    with pytest.raises(StoreError, match="has a trigger or a view, which no store has"):
        await sqlite_store(path).open()


def test_an_older_store_is_migrated_with_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, newest = tmp_path / "store.sqlite", max(VERSIONS)

    async def written() -> str:
        async with sqlite_store(path) as store:
            return (await store.enqueue_one("kept")).rollout_id

    async def read(rollout_id: str) -> Any:
        async with sqlite_store(path) as store:
            return (await store.get_rollout(rollout_id)).rollout.input

    rollout_id = asyncio.run(written())
    later = {newest + 1: ["CREATE TABLE second (x {integer})"], newest + 2: ["INSERT INTO second VALUES (3)"]}
    monkeypatch.setattr(migrate, "__defaults__", ({**VERSIONS, **later},))
    assert asyncio.run(read(rollout_id)) == "kept"
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (newest + 2,)
        assert connection.execute("SELECT x FROM second").fetchall() == [(3,)]


def test_migrations_run_one_after_the_other() -> None:
    ran: list[str] = []
    versions = {2: TABLES, 3: ["second"], 4: ["third"]}
    assert migrate(2, ran.append, "here", versions) == 4
    assert ran == ["second", "third"]


async def test_a_full_disk_loses_nothing_and_is_told(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "store.sqlite") as store:
        (kept,) = await store.enqueue([NewRollout(input="kept")])
        connection = store._database._connection.raw  # type: ignore[attr-defined]
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreUnavailableError, match=r"store\.sqlite: .*full.*Nothing was stored"):
            await store.enqueue([NewRollout(input="x" * 100_000)])
        connection.execute("PRAGMA max_page_count = 1000000")
        assert (await store.query_rollouts()).total == 1
        assert (await store.get_rollout(kept.rollout_id)).rollout.input == "kept"
        await store.enqueue([NewRollout(input="again")])


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "store.sqlite") as store:
        pass
    with pytest.raises(StoreUnavailableError, match="closed"):
        await store.statistics()


async def test_a_store_that_is_being_closed_ends_what_it_took_and_refuses_the_rest(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        store = await sqlite_store(tmp_path / "store.sqlite").open()
        taken = asyncio.create_task(store.enqueue([NewRollout(input=1)]))
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.aclose())
        asked = []
        while not closing.done():
            asked.append(asyncio.create_task(store.statistics()))
            await asyncio.sleep(0)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert not isinstance(answer, BaseException) or isinstance(answer, StoreUnavailableError)
        assert len(await taken) == 1


async def test_a_full_disk_loses_nothing_that_was_acknowledged(small_disk: Path) -> None:
    kept: list[str] = []
    async with sqlite_store(small_disk / "store.sqlite") as store:
        with pytest.raises(StoreUnavailableError, match="full"):
            while True:
                (rollout,) = await store.enqueue([NewRollout(input={"text": "x" * 50_000})])
                kept.append(rollout.rollout_id)
        with pytest.raises(StoreUnavailableError, match="Nothing was stored"):
            await store.enqueue([NewRollout(input={"text": "x" * 50_000})])
        assert (await store.query_rollouts(limit=1)).total == len(kept) > 5
        subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
        (last,) = await store.enqueue([NewRollout(input={"text": "y" * 50_000})])
    async with sqlite_store(small_disk / "store.sqlite") as store:
        found = (await store.query_rollouts(limit=1000)).items
        assert {one.rollout.rollout_id for one in found} == {*kept, last.rollout_id}
