"""`ReplyStream`: one model call as a stream of events, for every protocol."""

from __future__ import annotations

import asyncio
import logging

from ajet.gateway.chat import EpisodeSession, ReplyDelta
from ajet.schema.chat import ChatReply, ChatRequest
from ajet.schema.errors import ModelCallError
from ajet.system.http_messages import INTERNAL_ERROR

log = logging.getLogger(__name__)

Event = ReplyDelta | list[ChatReply] | ModelCallError


class InternalError(ModelCallError):
    """A defect of ours."""

    http_status = 500
    code = "internal_error"
    error_type = "server_error"


class ReplyStream:
    """The events of one call: deltas, then the replies or an error. Closing it cancels the generation."""

    def __init__(self, request: ChatRequest, session: EpisodeSession) -> None:
        self._request = request
        self._session = session
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            self._events.put_nowait(await self._session.complete(self._request, self._events.put_nowait))
        except ModelCallError as error:
            self._events.put_nowait(error)
        except Exception:  # our fault: the client gets an error like any other, and the server lives on
            log.exception("internal error in a streamed call of agent %r", self._request.agent)
        finally:
            self._events.put_nowait(InternalError(INTERNAL_ERROR))  # nobody reads it if another end came before

    async def first(self) -> Event:
        """The first event. An error is raised, so that the client gets its HTTP status."""
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if isinstance(event, ModelCallError):
            raise event
        return event

    async def next(self) -> Event:
        return await self._events.get()

    def close(self) -> None:
        self._task.cancel()
