"""Models whose replies a test decides, for agents."""

from __future__ import annotations

import json
from typing import Any

from ajet.agents import ModelMessage, Usage


def call(name: str, arguments: Any = None, call_id: str = "c1") -> dict[str, Any]:
    """A native tool call. Arguments that are text are left as they are."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}


def asks(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    """A reply with these tool calls."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


class Scripted:
    """A model function that gives these replies in turn, and the last one from then on; an exception is raised."""

    takes_tools = True

    def __init__(self, *replies: Any, usage: tuple[int, int] | None = None, finish_reason: str = "stop") -> None:
        self.replies = replies
        self.requests: list[dict[str, Any]] = []
        self.model = "scripted"
        self._usage = usage
        self._finish_reason = finish_reason

    async def __call__(self, messages: Any, *, tools: Any = None, **sampling: Any) -> Any:
        self.requests.append({"messages": json.loads(json.dumps(messages)), "tools": tools, **sampling})
        reply = self.replies[min(len(self.requests), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        message = ModelMessage(reply if isinstance(reply, dict) else {"role": "assistant", "content": reply})
        message.usage = None if self._usage is None else Usage(*self._usage)
        message.finish_reason = self._finish_reason
        return message
