"""`MemoryDatabase`: a store in this process's memory, gone with it. A transaction never waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ajet.store.errors import StoreUnavailableError
from ajet.store.memory_tables import Memory, MemoryTables
from ajet.store.tables import Events, Tables

T = TypeVar("T")


class MemoryDatabase:
    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._happened: Callable[[Events], None]

    async def open(self, happened: Callable[[Events], None], missed: Callable[[], None]) -> None:
        self._happened = happened
        self._memory = Memory()

    async def transact(self, work: Callable[[Tables], T], *, durable: bool = True) -> T:
        if self._memory is None:
            raise StoreUnavailableError("the store is closed")
        tables = MemoryTables(self._memory)
        try:
            result = work(tables)
        except BaseException:
            tables.undo()
            raise
        if tables.events:
            self._happened(tables.events)
        return result

    async def aclose(self) -> None:
        self._memory = None
