"""`BodyReader`: request bodies are decoded here, so that large ones don't hold up the service loop.

Decoding holds the interpreter, so a thread would not help. A large body is first checked by a process of its own: it
says why a body can't be read, or how many messages it has, and what has no room in the model's context is refused by
that. Only then does the loop decode it. Bodies are checked one at a time, and decoded one at a time, each key's in its
turn. A process that is killed is started again, and the body checked once more.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ajet.gateway import body_shape
from ajet.gateway.body_shape import Answer, Shape, question
from ajet.gateway.chat import EpisodeSession
from ajet.gateway.fields import BadField, json_body
from ajet.gateway.turns import LARGE, Turns
from ajet.schema.errors import EngineError
from ajet.system.child_process import ChildProcess

log = logging.getLogger(__name__)

PROGRAM = Path(body_shape.__file__)
CHECKED = 65_536
"""Bytes of a body that take the loop about a millisecond: checking less is not worth it."""
ANSWER_S = 20.0
"""How long a check may take. That of the largest body takes a fraction of a second."""
TRIES = 2


class BodyCheckError(EngineError):
    """Not the client's fault: it may try again."""

    http_status = 503
    code = "unavailable"


class BodyReader:
    """Lives on the service loop. Starts its process with the first large body; `aclose` ends it."""

    def __init__(self) -> None:
        self.turns = Turns()
        self._checks = Turns(rest=0.0)
        self._process: ChildProcess | None = None
        self._thread = ThreadPoolExecutor(1, "large-bodies")
        self._closed = False

    async def read(self, path: str, body: bytes, session: EpisodeSession) -> dict[str, Any]:
        """The request's JSON object. Raises a ModelCallError."""
        if len(body) <= LARGE:
            return json_body(body)
        if len(body) <= CHECKED:
            async with self.turns.turn(session):
                return json_body(body)
        shape = await self._shape(session, path, body)
        if session.most_bytes is not None:
            session.prompts.check_counts(shape.messages, shape.calls, shape.tokens)
        async with self.turns.turn(session):
            with _no_collection():
                read: dict[str, Any] = msgspec.json.decode(body)
            return read

    async def _shape(self, key: Hashable, path: str, body: bytes) -> Shape:
        async with self._checks.turn(key):
            try:
                line = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, path, body)
            except (OSError, RuntimeError) as error:  # it ended, hangs, or can't be started; or this is closed
                log.error("a large request can't be checked: %s: %s", type(error).__name__, error)
                raise BodyCheckError("the gateway can't check large requests at the moment: try again later") from error
        answer = msgspec.json.decode(line, type=Answer)
        if answer.shape is None:
            raise BadField("body", answer.refused)
        return answer.shape

    # ------------------------------------------------------------ the process

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def _ask(self, path: str, body: bytes) -> bytes:
        """On the thread."""
        asked = question(path, body)
        for left in reversed(range(TRIES)):
            if self._closed:
                break
            self._process = process = self._process or ChildProcess(PROGRAM)
            try:
                return process.ask(asked, ANSWER_S)
            except BaseException as error:
                self._process = None
                process.end()
                if not left or not isinstance(error, ConnectionError):
                    raise
        raise ConnectionError("the gateway is closed")

    async def aclose(self) -> None:
        """End the process, whatever it is doing."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._end)
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        """On the thread, after what it was asked last."""
        if self._process is not None:
            self._process.end()
            self._process = None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of new objects would have the collector go through all there are, of which none is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
