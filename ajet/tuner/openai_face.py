"""`as_raw_openai_sdk_client`: OpenAI's own asynchronous client; `model` may be left out."""

from __future__ import annotations

import inspect
import json
from functools import cached_property
from http import HTTPStatus
from typing import Any

import openai
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion

from ajet.tuner.connection import Connection
from ajet.tuner.crossing import Asked, Crossing

PATH = "/chat/completions"
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
        client: Any = self._client
        kwargs.setdefault("model", getattr(client, "default_model", ""))
        if not args and isinstance(client, TunedOpenAI) and _is_body(kwargs):
            return await client.whole_reply(kwargs)
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
    crossing: Crossing | None = None
    """To a session in this process: the way of requests that need nothing of HTTP."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._platform = "Unknown"  # a header nobody reads; to find it out takes a thread for each client

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)

    async def whole_reply(self, body: dict[str, Any]) -> ChatCompletion:
        """The reply to a request that is plain JSON already. OpenAI's own way searches it for parts to convert, then
        builds, sends and reads an HTTP request, which takes several times as long as all of our part."""
        if self.crossing is None or self.timeout is not None:
            return await self.post(PATH, cast_to=ChatCompletion, body=body)
        text = json.dumps(body, ensure_ascii=False, allow_nan=False)
        answer = await self.crossing.ask("POST", f"/v1{PATH}", text.encode())
        if answer.status == HTTPStatus.OK and isinstance(answer.body, bytes):
            reply = ChatCompletion.construct(**json.loads(answer.body))
            reply._request_id = answer.headers.get("x-request-id")  # public in spite of its name
            return reply
        # What to make of an error, or whether to ask again, the client decides as after any response.
        asked = self.copy(http_client=_client_over(Asked(self.crossing, answer)))
        return await asked.post(PATH, cast_to=ChatCompletion, body=body)

    def copy(self, **kwargs: Any) -> TunedOpenAI:
        copied = super().copy(**kwargs)
        copied.default_model = self.default_model
        copied.crossing = None if {"http_client", "base_url"} & kwargs.keys() else self.crossing
        return copied

    with_options = copy


def _client_over(crossing: Crossing) -> Any:
    return Connection.in_process(crossing, "").async_client(openai.DefaultAsyncHttpxClient)


def openai_client(connection: Connection) -> TunedOpenAI:
    """Waits as long as the episode may last: the deadline is the episode's, not the client's."""
    client = TunedOpenAI(
        base_url=connection.base_url,
        api_key=connection.api_key,
        http_client=connection.async_client(openai.DefaultAsyncHttpxClient),
        timeout=None,
    )
    client.default_model = connection.model
    client.crossing = connection.crossing
    return client
