"""`RobustDashScopeChatModel`, which old files use for agents and judges that are not trained."""

from __future__ import annotations

import asyncio
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

    def __init__(self, model_name: str, api_key: str | None = None, stream: bool = False, **_options: Any) -> None:
        """Further arguments, such as `enable_thinking`, are DashScope's own and are not passed on."""
        self.model_name = self.model = model_name
        self.stream = stream
        self.context_size = CONTEXT_SIZE
        self._api_key = api_key
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        """AgentScope's own call: messages in, a response out."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            connection = Connection(*HelperModel.former(self.model_name, self._api_key).endpoint())
            self._clients[loop] = agentscope_model(connection, context_size=self.context_size, stream=self.stream)
        return await self._clients[loop](*arguments, **options)
