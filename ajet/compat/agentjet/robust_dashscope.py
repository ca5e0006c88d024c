"""`RobustDashScopeChatModel`, which old files use for agents and judges that are not trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

from ajet.task_judge.helper import HelperModel
from ajet.task_runner.tuner import Connection, agentscope_model

CONTEXT_SIZE = 32768
"""The context length that AgentScope 2 is given."""


class RobustDashScopeChatModel:
    """A chat model for AgentScope at the helper's endpoint (`HelperModel.former`). Its client retries.

    It is often made when a file is imported, so it looks for the endpoint on its first call, and it keeps one client
    per event loop.
    """

    def __init__(
        self, model_name: str = "qwen3-max", stream: bool = False, api_key: str | None = None, **_options: Any
    ) -> None:
        """Further arguments, such as `enable_thinking`, are DashScope's own and are not passed on."""
        self.model_name = self.model = model_name
        self.stream = stream
        self.context_size = CONTEXT_SIZE
        self._api_key = api_key
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    async def __call__(self, messages: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        """AgentScope's own call: messages in, a response out. Who passes dictionaries, as AgentScope 1 does, gets a
        response whose blocks are dictionaries, from AgentScope 2 as well."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            connection = Connection(*HelperModel.former(self.model_name, self._api_key).endpoint())
            self._clients[loop] = agentscope_model(connection, context_size=self.context_size, stream=self.stream)
        if not _are_plain(messages) or version("agentscope").startswith("1."):
            return await self._clients[loop](messages, *arguments, **options)
        reply = await self._clients[loop]([_as_message(each) for each in messages], *arguments, **options)
        return _all_with_plain_blocks(reply) if self.stream else _with_plain_blocks(reply)


def _are_plain(messages: Sequence[Any]) -> bool:
    return any(isinstance(message, dict) for message in messages)


def _as_message(message: Any) -> Any:
    """A message of AgentScope 2 from a dictionary with text."""
    from agentscope.message import Msg, TextBlock

    if not isinstance(message, dict):
        return message
    role: Any = message.get("role")
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    if role not in ("system", "user", "assistant") or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"RobustDashScopeChatModel takes dictionaries with text of role system, user or assistant, not "
            f"{message!r:.200}; pass anything else as agentscope.message.Msg"
        )
    return Msg(name=message.get("name", role), content=[TextBlock(text=text) for text in texts], role=role)


def _with_plain_blocks(reply: Any) -> Any:
    reply.content = [block.model_dump() for block in reply.content]
    return reply


async def _all_with_plain_blocks(replies: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for reply in replies:
        yield _with_plain_blocks(reply)
