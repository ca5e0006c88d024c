"""Chat requests over `/v1/chat/completions`: for helpers and judges, and for servers that do not speak token ids."""

from __future__ import annotations

import uuid
from typing import Any

from ajet.engine.remote.client import RemoteClient
from ajet.engine.remote.completions import sampling_fields
from ajet.schema.chat import ChatReply, ChatRequest, Message, ReplyFinish
from ajet.schema.errors import EngineError
from ajet.schema.generation import Completion

STANDARD = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "seed"})
"""What every OpenAI-compatible server understands; others may refuse a request with more."""


def chat_body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The request in OpenAI's form, with nothing in it that was not asked for."""
    fields = {name: value for name, value in sampling_fields(request.sampling).items() if name in STANDARD}
    body: dict[str, Any] = {"model": model, "messages": request.messages, **fields}
    if request.tools:
        body |= {"tools": request.tools, "tool_choice": request.tool_choice}
    if request.sampling.max_tokens is not None:
        body["max_tokens"] = request.sampling.max_tokens
    if request.response_format is not None:
        body["response_format"] = request.response_format
    return body


async def ask_chat(client: RemoteClient, request: ChatRequest, model: str, *, sticky: str = "") -> ChatReply:
    """One reply. It has no token ids: it can be read, never trained."""
    answer = await client.post("/chat/completions", chat_body(request, model), sticky=sticky)
    try:
        choice = answer["choices"][0]
        said = choice["message"]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"the server's answer holds no message: {str(answer)[:200]}") from error
    message: Message = {"role": "assistant", "content": said.get("content") or ""}
    for optional in ("reasoning_content", "tool_calls"):
        if said.get(optional):
            message[optional] = said[optional]
    finish = _finish(choice.get("finish_reason"), bool(said.get("tool_calls")))
    empty = Completion([], [], "length" if finish == "length" else "stop")
    name = str(answer.get("id") or uuid.uuid4().hex)
    return ChatReply(name, message, finish, message["content"], [], empty)


def _finish(said: str | None, calls_tools: bool) -> ReplyFinish:
    if calls_tools:
        return "tool_calls"
    return "length" if said == "length" else "stop"
