"""`SessionModelFunction`: a model that is loaded in this process, as a model function for agents without training."""

from __future__ import annotations

from typing import Any

from ajet.agents.reply import ModelMessage
from ajet.gateway.chat import EpisodeSession
from ajet.schema.chat import ChatRequest
from ajet.schema.generation import Sampling
from ajet.schema.trajectory import Usage


class SessionModelFunction:
    """Asks over one session. Called on the engine's event loop."""

    takes_tools = True

    def __init__(self, session: EpisodeSession) -> None:
        self._session = session

    async def __call__(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int | None = None,
        stop: str | list[str] | None = None,
        parallel_tool_calls: bool = True,
        tool_choice: Any = "auto",
    ) -> ModelMessage:
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        request = ChatRequest(
            messages,
            tools=tools or [],
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            sampling=Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop=stops),
        )
        (reply,) = await self._session.complete(request)
        message = ModelMessage(reply.message)
        message.usage = Usage(len(reply.prompt_ids), len(reply.completion.token_ids))
        message.finish_reason = reply.finish_reason
        message.reply_id = reply.call_id
        message.malformed = reply.malformed
        return message
