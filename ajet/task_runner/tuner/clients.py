"""The clients a workflow may ask for: each is its framework's own class, bound to one agent's model by a `Connection`.

To add a framework: a function here that builds its client (importing the library inside), and an `as_…` method of
`AjetTuner` that calls it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import openai
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion
from pydantic import ValidationError

from ajet.schema.errors import MissingDependencyError
from ajet.schema.install import install_command
from ajet.task_runner.tuner.connection import AnsweredBridge, Asked, Connection, HttpBridge, client_over

if TYPE_CHECKING:
    from ajet.agents.model_function import ModelFunction


def agentscope_model(connection: Connection, *, context_size: int, stream: bool) -> Any:
    """An `OpenAIChatModel` of the installed AgentScope, 1.0.x or 2.x."""
    try:
        from agentscope import model as models
    except ImportError as error:
        raise MissingDependencyError(
            f"as_agentscope_model needs AgentScope ({error}): {install_command('agentscope')}"
        ) from error
    client: dict[str, Any] = {
        "timeout": None,
        "http_client": connection.async_client(openai.DefaultAsyncHttpxClient),
    }
    model_class: Any = models.OpenAIChatModel  # its signature depends on the version
    parameters = inspect.signature(model_class.__init__).parameters
    if "credential" not in parameters:  # 1.0.x
        name = "client_kwargs" if "client_kwargs" in parameters else "client_args"
        client["base_url"] = connection.base_url
        return model_class(model_name=connection.model, api_key=connection.api_key, stream=stream, **{name: client})
    from agentscope import credential as credentials

    credential: Any = credentials.OpenAICredential
    return model_class(
        credential=credential(api_key=connection.api_key, base_url=connection.base_url),
        model=connection.model,
        stream=stream,
        max_retries=0,  # the OpenAI client inside retries what is worth retrying
        context_size=context_size,
        client_kwargs=client,
    )


def anthropic_client(connection: Connection) -> Any:
    try:
        import anthropic
    except ImportError as error:
        raise MissingDependencyError(
            f"as_anthropic_client needs the anthropic package ({error}): {install_command('anthropic')}"
        ) from error
    client_class: Any = anthropic.AsyncAnthropic
    return client_class(
        base_url=connection.base_url.removesuffix("/v1"),  # the client adds /v1 to each path
        api_key=connection.api_key,
        http_client=connection.async_client(anthropic.DefaultAsyncHttpxClient),
        timeout=None,
    )


def langchain_model(connection: Connection, options: dict[str, Any]) -> Any:
    """A `langchain_openai.ChatOpenAI`, for `invoke` and `ainvoke`; `options` go to its constructor."""
    try:
        from langchain_openai import ChatOpenAI
    except ImportError as error:
        raise MissingDependencyError(
            f"as_langchain_model needs langchain-openai ({error}): {install_command('langchain')}"
        ) from error
    model_class: Any = ChatOpenAI
    return model_class(
        **{
            "model": connection.model,
            "base_url": connection.base_url,
            "api_key": connection.api_key,
            "timeout": None,
            "http_client": connection.blocking_client(openai.DefaultHttpxClient),
            "http_async_client": connection.async_client(openai.DefaultAsyncHttpxClient),
            **options,
        }
    )


def openai_client(connection: Connection) -> TunedOpenAI:
    """An `openai.AsyncOpenAI` without a timeout of its own: the episode's deadline applies."""
    client = TunedOpenAI(
        base_url=connection.base_url,
        api_key=connection.api_key,
        http_client=connection.async_client(openai.DefaultAsyncHttpxClient),
        timeout=None,
    )
    client.default_model = connection.model
    client.bridge = connection.bridge
    if connection.bridge is None and not connection.proxied and HttpBridge.can_reach(connection.base_url):
        client.bridge = HttpBridge(connection.base_url, connection.api_key)
    return client


def model_function(connection: Connection) -> ModelFunction:
    from ajet.agents.model_function import OpenAIModelFunction  # ready agents and tools come with it

    return OpenAIModelFunction(openai_client(connection), connection.model)


# ------------------------------------------------------------ OpenAI's client, with a short cut

_PATH = "/chat/completions"
_BODY_FIELDS = frozenset(inspect.signature(AsyncCompletions.create).parameters) - {
    "self",
    "extra_headers",
    "extra_query",
    "extra_body",
    "timeout",
}
"""The arguments of `create` that are fields of the request's body under the same name."""


class TunedOpenAI(openai.AsyncOpenAI):
    """OpenAI's client bound to one agent's model; `model` may be left out of a request."""

    default_model: str = ""
    bridge: Asked | None = None
    """To a session in this process, or to the gateway of this machine; used directly by requests that need nothing of
    the HTTP library."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._platform = "Unknown"  # a header nobody reads; finding it out takes a thread per client

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)

    async def whole_reply(self, body: dict[str, Any]) -> ChatCompletion:
        """The reply to a request that is plain JSON already. OpenAI's own way searches it for parts to convert, then
        builds, sends and reads an HTTP request, which takes several times as long as everything we do."""
        if self.bridge is None or self.timeout is not None or self._custom_headers or self._custom_query:
            return await self.post(_PATH, cast_to=ChatCompletion, body=body)
        text = json.dumps(body, ensure_ascii=False, allow_nan=False)
        try:
            answer = await self.bridge.ask("POST", f"/v1{_PATH}", text.encode())
        except OSError:  # no gateway: the client decides whether to ask again, and what to raise
            return await self.post(_PATH, cast_to=ChatCompletion, body=body)
        if answer.status == HTTPStatus.OK and isinstance(answer.body, bytes):
            reply = _read_reply(answer.body)
            reply._request_id = answer.headers.get("x-request-id")  # public in spite of its name
            return reply
        # The client decides what an error means and whether to ask again, as it does for any response.
        answered = AnsweredBridge(self.bridge, answer)
        asked = self.copy(http_client=client_over(answered, openai.DefaultAsyncHttpxClient))
        return await asked.post(_PATH, cast_to=ChatCompletion, body=body)

    def copy(self, **kwargs: Any) -> TunedOpenAI:
        copied = super().copy(**kwargs)
        copied.default_model = self.default_model
        copied.bridge = None if {"http_client", "base_url", "api_key"} & kwargs.keys() else self.bridge
        return copied

    with_options = copy


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, *messages: Any, **kwargs: Any) -> Any:
        """OpenAI's own `create`, which may also be given the messages as its only positional argument."""
        client: Any = self._client
        if messages:
            if len(messages) > 1 or "messages" in kwargs:
                raise TypeError("create takes the messages once, and everything else by name")
            kwargs["messages"] = messages[0]
        kwargs.setdefault("model", getattr(client, "default_model", ""))
        if isinstance(client, TunedOpenAI) and (body := _body(kwargs)) is not None:
            return await client.whole_reply(body)
        return await super().create(**kwargs)


def _read_reply(body: bytes) -> ChatCompletion:
    """As OpenAI's client reads it, in an eighth of the time. It checks nothing, so what isn't valid is read its way."""
    try:
        return ChatCompletion.model_validate_json(body)
    except ValidationError:
        return ChatCompletion.construct(**json.loads(body))


def _body(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON body of the request, if the arguments are, as they stand, one for a whole (not streamed) reply."""
    extra = kwargs.get("extra_body")
    if extra is not None:
        kwargs = {key: value for key, value in kwargs.items() if key != "extra_body"}
    if "messages" not in kwargs or kwargs.get("stream") or not kwargs.keys() <= _BODY_FIELDS:
        return None
    body = kwargs if extra is None else {**kwargs, **extra} if isinstance(extra, dict) else None
    return body if _is_json(body) else None


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_json, value.values()))
    if kind is list:
        return all(map(_is_json, value))
    return value is None or kind in (str, int, float, bool)


_REPLY = {
    "id": "chatcmpl-rehearsal",
    "object": "chat.completion",
    "created": 0,
    "model": "rehearsal",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ready"}}],
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
