"""`Database`: where a store's tables are. A kind runs transactions and passes on what they did.

To add a kind: implement these four methods, and let `ajet/store/open_store.py` make it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from ajet.store.tables import Events, Tables

T = TypeVar("T")


class Database(Protocol):
    """Used on one event loop."""

    async def open(self, happened: Callable[[Events], None], missed: Callable[[], None]) -> None:
        """Connect, and bring the tables to the newest version. Raises a StoreError.

        `happened` is called on the event loop after each transaction that queued or ended something, also if another
        process made it; `missed` if some may have gone unnoticed.
        """
        ...

    async def transact(self, work: Callable[[Tables], T], *, durable: bool = True) -> T:
        """Run `work` in a transaction, and return once it is committed. What it raises undoes it.

        `durable=False`: it may be lost if the machine stops, but not if only this process is killed.
        """
        ...

    async def aclose(self) -> None: ...
