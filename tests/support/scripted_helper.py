"""A helper model on a real socket whose answers a test decides: OpenAI's protocol, no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.http_server import Answer, Server

USAGE = {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40}


def reply(text: str, finish_reason: str = "stop") -> Answer:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    return 200, {}, body


@contextmanager
def helper(answer: Callable[[str], str | Answer]) -> Iterator[Server]:
    """`answer` gets the last message's text, and gives the reply's text or a whole HTTP answer."""

    def handle(_path: str, body: dict[str, Any], _key: str) -> Answer:
        said = answer(body["messages"][-1]["content"])
        return reply(said) if isinstance(said, str) else said

    server = Server(handle)
    try:
        yield server
    finally:
        server.http.shutdown()
