"""`LongPrompts`: what one episode's long prompts may cost, and where the work is done.

Rendering and encoding a long text takes many milliseconds, which everybody on the service loop would wait for. So it is
done ahead on a thread: afterwards the loop finds the pieces in the encoder's cache, or the prompt is refused before
anything of it is recorded. An episode has one such text rendered at a time, and its requests may hold so many bytes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ajet.schema.chat import Message, Tool
from ajet.schema.errors import InvalidRequestError

if TYPE_CHECKING:
    from ajet.context_tracker import ContextTracker, Renderer

T = TypeVar("T")

LONG_TEXT = 8192
"""Bytes that take about two milliseconds to render and encode: less is not worth a thread."""
BYTES_PER_TOKEN = 32
"""No request needs more of them for each token of the model's context, even of indented code escaped as JSON."""
LEAST_REQUEST_BYTES = 65_536
MAX_TEMPLATE_KWARGS_BYTES = 16_384
MAX_EPISODE_BYTES = 512 * 1024 * 1024
"""Of all that an episode's requests add to what was known: 400 KB, written anew at each of 1,000 calls, pass."""
SWITCH_S = 0.0005
"""How long the thread lets others wait for the interpreter."""
_threads: ThreadPoolExecutor | None = None


def _forget() -> None:
    """In a forked process, the parent's threads aren't ours."""
    global _threads, _yielding
    _threads, _yielding = None, _Yielding()


os.register_at_fork(after_in_child=_forget)


class LongPrompts:
    """Lives on the service loop."""

    def __init__(self, tracker: ContextTracker, renderer: Renderer) -> None:
        self._tracker = tracker
        self._renderer = renderer
        self._one = asyncio.Lock()
        self._held = 0

    @property
    def most_bytes(self) -> int:
        """The largest request that can fit into the model's context."""
        return LEAST_REQUEST_BYTES + BYTES_PER_TOKEN * self._tracker.settings.max_model_len

    def check_size(self, size: int) -> None:
        """Refuse a request by its size, before it is read. Raises ContextOverflowError."""
        if size > self.most_bytes:
            self._tracker.check_room(size // BYTES_PER_TOKEN)

    def check_counts(self, messages: int, calls: int, tokens: int) -> None:
        """Refuse a request by how many messages and tool calls, or token ids, it has, before they are read. Raises
        ContextOverflowError."""
        least = self._renderer.least
        known = max(tokens, least.message * messages + least.call * calls)
        if known > self._most_rendered:
            self._tracker.check_room(known)

    async def render_ahead(
        self, agent: str, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Any]
    ) -> None:
        """Prepare for `ContextTracker.begin`. Raises a ModelCallError if it would."""
        if kwargs and _size(kwargs) > MAX_TEMPLATE_KWARGS_BYTES:
            raise InvalidRequestError(f"chat_template_kwargs has more than {MAX_TEMPLATE_KWARGS_BYTES} bytes")
        self.check_counts(len(messages), 0, 0)
        size = self._tracker.new_bytes(agent, messages, tools)
        self.check_size(size)
        if self._held + size > MAX_EPISODE_BYTES:
            raise InvalidRequestError(f"this episode's requests hold more than {MAX_EPISODE_BYTES >> 20} MB in all")
        if size > LONG_TEXT:
            rendered = await self.length(messages, tools, kwargs)
            if rendered > self._most_rendered:
                self._tracker.check_room(rendered)
        self._held += size

    @property
    def _most_rendered(self) -> int:
        """What is longer has no room, even if it extends a recorded call, which may be a little shorter."""
        limit = self._tracker.settings.max_model_len
        return limit + limit // 8

    async def length(self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Any]) -> int:
        """How many tokens these messages render to; of a text that is much too long, how many its beginning does.
        Raises a ModelCallError."""
        least = self._renderer.least
        known = least.message * len(messages) + 2 * len(tools)
        self._tracker.check_room(known)
        self._tracker.check_room(known + least.call * sum(map(_calls, messages)))
        return await self._on_thread(self._renderer.length, messages, tools, kwargs, self._most_rendered)

    async def encode(self, text: str) -> list[int]:
        """A raw prompt's tokens; control tokens in it count as such. Raises a ModelCallError."""
        return self._encode(text) if len(text) <= LONG_TEXT else await self._on_thread(self._encode, text)

    def _encode(self, text: str) -> list[int]:
        self._tracker.check_room(self._renderer.encoder.beyond(text, self._most_rendered))
        ids: list[int] = self._renderer.tokenizer.encode(text)
        return ids

    async def _on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        global _threads
        _threads = _threads or ThreadPoolExecutor(1, "long-prompts")
        await self._one.acquire()
        work = asyncio.get_running_loop().run_in_executor(_threads, function, *arguments)
        _yielding.begin()
        work.add_done_callback(self._thread_is_free)  # not before: nobody can stop the thread
        return await asyncio.shield(work)

    def _thread_is_free(self, _: asyncio.Future[Any]) -> None:
        _yielding.end()
        self._one.release()


class _Yielding:
    """While long prompts are read on the thread, whoever waits for the interpreter gets it ten times as soon as usual.

    Not always: threads that compute at the same time, such as workflows and the embedded engine, would lose more time
    to switching than others gain. Lives on the service loop.
    """

    def __init__(self) -> None:
        self._running = 0
        self._usual = 0.0

    def begin(self) -> None:
        if not self._running:
            self._usual = sys.getswitchinterval()
            sys.setswitchinterval(min(self._usual, SWITCH_S))
        self._running += 1

    def end(self) -> None:
        self._running -= 1
        if not self._running:
            sys.setswitchinterval(self._usual)


_yielding = _Yielding()


def _calls(message: Any) -> int:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return len(calls) if isinstance(calls, list) else 0


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))
