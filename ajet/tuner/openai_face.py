"""`as_raw_openai_sdk_client`: OpenAI's own asynchronous client; `model` may be left out."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import openai
from openai.resources.chat import AsyncChat, AsyncCompletions

from ajet.tuner.connection import Connection


class _Completions(AsyncCompletions):
    async def create(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("model", getattr(self._client, "default_model", ""))
        return await super().create(*args, **kwargs)


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class TunedOpenAI(openai.AsyncOpenAI):
    """OpenAI's client bound to one agent's model."""

    default_model: str = ""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._platform = "Unknown"  # a header nobody reads; to find it out takes a thread for each client

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)

    def copy(self, **kwargs: Any) -> TunedOpenAI:
        copied = super().copy(**kwargs)
        copied.default_model = self.default_model
        return copied

    with_options = copy


def openai_client(connection: Connection) -> TunedOpenAI:
    """Waits as long as the episode may last: the deadline is the episode's, not the client's."""
    client = TunedOpenAI(
        base_url=connection.base_url,
        api_key=connection.api_key,
        http_client=connection.async_client(openai.DefaultAsyncHttpxClient),
        timeout=None,
    )
    client.default_model = connection.model
    return client
