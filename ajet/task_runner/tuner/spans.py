"""`SpanSink`: from the code of an episode to its record. Never blocks that code, whatever becomes of the spans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ajet.gateway.chat import EpisodeSession
from ajet.observe.tracing.sender import SpanSender
from ajet.schema.span import Span


class SpanSink:
    """Takes finished spans, from any thread."""

    def __init__(self, add: Callable[[Span], None], flush: Callable[[], object]) -> None:
        self.add = add
        self.flush = flush
        """Wait, for a while at most, until all that was added has arrived."""

    @classmethod
    def to_session(cls, session: EpisodeSession, loop: asyncio.AbstractEventLoop) -> SpanSink:
        """In the process that runs the episode. `loop`: the session's."""

        def add(span: Span) -> None:
            with suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(lambda: session.add_spans([span], rewards_count=True))

        return cls(add, lambda: None)  # the loop keeps their order: they arrive before the workflow's result

    @classmethod
    def to_gateway(cls, base_url: str, key: str) -> SpanSink:
        """In any other process."""
        sender = SpanSender(
            base_url.removesuffix("/v1"), {"authorization": f"Bearer {key}"}, what=f"the gateway at {base_url}"
        )
        return cls(sender.add, sender.flush)
