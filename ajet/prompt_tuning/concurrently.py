"""`concurrently`: several coroutines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def concurrently(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. An error cancels the others first, and is raised on its own."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]
