"""The kinds of store that the conformance tests run on, each started for one test."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from ajet.store.client import StoreClient
from ajet.store.database_store import DatabaseStore, memory_store, postgres_store, sqlite_store
from ajet.store.requests import Role
from ajet.store.rollout_store import RolloutStore
from ajet.store.server import StoreServer, issue

KINDS = ("memory", "sqlite", "postgres", "http")
"""`http`: a client of a server of a store in a file."""
BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


class Clock:
    """The store's clock, which a test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def postgres_cluster(folder: Path) -> Iterator[str]:
    """A private PostgreSQL without network, from Debian's package. Yields the URL of its socket's folder."""
    if not BINARIES:
        pytest.skip("needs Debian's package postgresql")
    binaries, data = BINARIES[-1], folder / "data"
    sockets = Path(f"/tmp/ajet-pg-{uuid.uuid4().hex[:8]}")  # a socket's path must be short
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    for path in (sockets, data):
        path.mkdir(mode=0o700, parents=True)
        if as_user:
            shutil.chown(path, "postgres")
    for parent in [data, *data.parents]:  # the server's user must reach its data
        if as_user and parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o711)
    start = [*as_user, str(binaries / "initdb"), "-D", str(data), "-A", "trust", "-N", "--no-locale", "-E", "UTF8"]
    subprocess.run(start, check=True, capture_output=True, cwd="/")
    options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={sockets}", "-c", "fsync=off"]
    server = subprocess.Popen(
        [*as_user, str(binaries / "postgres"), "-D", str(data), *options],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("wb"),
        cwd="/",
    )
    try:
        ready = [str(binaries / "pg_isready"), "-q", "-h", str(sockets), "-U", "postgres"]
        for _ in range(600):
            if subprocess.run(ready, check=False).returncode == 0:
                break
            assert server.poll() is None, (folder / "log").read_text()
            subprocess.run(["sleep", "0.05"], check=True)
        yield f"postgresql://postgres@/postgres?host={sockets}"
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(sockets, ignore_errors=True)


def fresh_database(url: str) -> str:
    """A new database in the cluster."""
    import psycopg

    name = f"store_{uuid.uuid4().hex[:10]}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return url.replace("/postgres?", f"/{name}?")


class Opener:
    """Opens stores of one kind, over and over: what is on disk stays between them."""

    def __init__(self, kind: str, folder: Path, postgres: Callable[[], str]) -> None:
        self.kind = kind
        self._folder = folder
        self._postgres = postgres
        self._url: str | None = None

    def database_store(self, clock: Clock | None = None) -> DatabaseStore:
        if self.kind in ("sqlite", "http"):
            store = sqlite_store(self._folder / "store.sqlite")
        elif self.kind == "postgres":
            self._url = self._url or fresh_database(self._postgres())
            store = postgres_store(self._url)
        else:
            store = memory_store()
        if clock is not None:
            store._clock = clock
        return store

    @asynccontextmanager
    async def open(self, clock: Clock | None = None) -> AsyncIterator[tuple[RolloutStore, DatabaseStore]]:
        """The store to use, and the one behind it, for a minute."""
        async with asyncio.timeout(60), self.database_store(clock) as store:
            if self.kind != "http":
                yield store, store
                return
            key = await store.tables(lambda tables: issue(tables, "all", list(Role)))
            server = StoreServer(store)
            await server.start()
            try:
                async with StoreClient(server.url, key, patience_seconds=5) as client:
                    yield client, store
            finally:
                await server.aclose()
