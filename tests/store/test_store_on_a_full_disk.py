"""A store whose disk is full says so, keeps what it acknowledged, and goes on when there is room again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ajet.store.database_store import sqlite_store
from ajet.store.requests import NewRollout, StoreUnavailableError

pytestmark = pytest.mark.anyio


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MB of disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


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
