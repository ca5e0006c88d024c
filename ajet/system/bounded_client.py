"""`BoundedClient`: an `httpx.AsyncClient` whose answers have a largest size, whoever reads them and however.

Answers come uncompressed, because a small compressed one can grow without end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""A reply of 100,000 tokens with their ids and 20 likeliest alternatives each takes about as much."""


class AnswerTooLargeError(Exception):
    """A server's answer is larger than allowed, or compressed although that was not asked for."""


class BoundedClient(httpx.AsyncClient):
    """As `httpx.AsyncClient`. Reading an answer larger than `max_answer_bytes` raises AnswerTooLargeError."""

    def __init__(self, *arguments: Any, max_answer_bytes: int = MAX_ANSWER_BYTES, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.headers["accept-encoding"] = "identity"
        self._max_answer_bytes = max_answer_bytes

    async def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send a request. All of httpx's ways to send one come here."""
        request.headers["accept-encoding"] = "identity"
        response = await super().send(request, stream=True, **options)
        try:
            if (coding := response.headers.get("content-encoding", "identity")) != "identity":
                raise AnswerTooLargeError(
                    f"{request.url} answered with content-encoding {coding!r}, not as it was asked"
                )
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _Bounded(response.stream, self._max_answer_bytes, str(request.url))
            if not stream:
                await response.aread()
        except BaseException:
            await response.aclose()
            raise
        return response


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, most: int, url: str) -> None:
        self._stream, self._most, self._url = stream, most, url

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._stream:
            size += len(piece)
            if size > self._most:
                raise AnswerTooLargeError(f"the answer of {self._url} is larger than {self._most >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
