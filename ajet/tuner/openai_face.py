"""`as_raw_openai_sdk_client`: OpenAI's own asynchronous client; `model` may be left out."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import openai
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion

from ajet.tuner.connection import Connection

_IN_BODY = frozenset(inspect.signature(AsyncCompletions.create).parameters) - {
    "self",
    "extra_headers",
    "extra_query",
    "extra_body",
    "timeout",
}
"""The arguments of `create` that are fields of the request's body under their own name."""


class _Completions(AsyncCompletions):
    async def create(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("model", getattr(self._client, "default_model", ""))
        if not args and _is_body(kwargs):
            # The same request without the search for parts to convert, which takes longer than sending it.
            return await self._client.post("/chat/completions", cast_to=ChatCompletion, body=kwargs)
        return await super().create(*args, **kwargs)


def _is_body(kwargs: dict[str, Any]) -> bool:
    """Whether the arguments are the JSON body of a whole (not streamed) reply as they stand."""
    return "messages" in kwargs and not kwargs.get("stream") and kwargs.keys() <= _IN_BODY and _is_json(kwargs)


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_json, value.values()))
    if kind is list:
        return all(map(_is_json, value))
    return value is None or kind in (str, int, float, bool)


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
