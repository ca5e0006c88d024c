"""What travels between callers and the engine's thread.

Inwards one inbox, emptied between steps. Outwards to the caller's event loop, one call a loop and step.
"""

from __future__ import annotations

import asyncio
import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ajet.engine.base import OnTokens
from ajet.schema.generation import Completion, GenerateRequest, TokenChunk

if TYPE_CHECKING:
    from ajet.engine.torch.worker import Worker


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through the thread, and where its answer goes."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Completion]
    on_tokens: OnTokens | None


@dataclass(slots=True)
class Submit:
    ticket: Ticket


@dataclass(slots=True)
class Cancel:
    ticket: Ticket


@dataclass(slots=True)
class Command:
    """Something to do between two steps, in the thread."""

    action: Callable[[Worker], Any]
    done: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class Pause:
    """Start nothing new; `done` when nothing is in flight."""

    done: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class Resume:
    pass


@dataclass(slots=True)
class Close:
    pass


Message = Submit | Cancel | Command | Pause | Resume | Close
Inbox = queue.SimpleQueue[Message]


class Outbox:
    """Collects what a step has to say, and says it in one call a loop."""

    def __init__(self) -> None:
        self._calls: defaultdict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)

    def tokens(self, ticket: Ticket, token: int, logprob: float) -> None:
        on_tokens = ticket.on_tokens
        if on_tokens is not None:
            chunk = TokenChunk([token], [logprob])
            self._calls[ticket.loop].append(lambda: None if ticket.answer.done() else on_tokens(chunk))

    def complete(self, ticket: Ticket, completion: Completion) -> None:
        answer = ticket.answer
        self._calls[ticket.loop].append(lambda: None if answer.done() else answer.set_result(completion))

    def fail(self, ticket: Ticket, error: Exception) -> None:
        answer = ticket.answer
        self._calls[ticket.loop].append(lambda: None if answer.done() else answer.set_exception(error))

    def flush(self) -> None:
        """Hand everything over. A loop that is closed has nobody waiting any more."""
        for loop, calls in self._calls.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_run_all, calls)
        self._calls.clear()


def _run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
