"""`rehearse`: one conversation with a model that isn't there, so that all others, in this process and its forks, find
everything prepared. OpenAI's client imports most of itself and builds its types at its first request, which may take
longer than an episode.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ajet.task_runner.tuner.clients import openai_client
from ajet.task_runner.tuner.connection import Connection

_REPLY = {
    "id": "chatcmpl-rehearsal",
    "object": "chat.completion",
    "created": 0,
    "model": "rehearsal",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "ready",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "begin", "arguments": "{}"}}],
            },
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_MESSAGES: Any = [{"role": "user", "content": "ready?"}]


def rehearse() -> None:
    """Have a client of this process ask a server of this process once. Leaves no thread and no socket."""
    asyncio.run(_rehearse())


async def _rehearse() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        client = openai_client(Connection(f"http://{host}:{port}/v1", "none", "rehearsal", proxied=False))
        async with client:
            await client.chat.completions.create(messages=_MESSAGES, model="rehearsal")
            await client.chat.completions.create(messages=_MESSAGES, model="rehearsal", timeout=60)  # over its library


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    body = json.dumps(_REPLY).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()
    writer.close()
