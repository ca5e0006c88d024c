"""The model function: all that an agent needs of a model.

    async def model(messages, *, tools=None, **sampling) -> message

`messages`, `tools` and the returned assistant message are plain dicts in OpenAI's form; the message has `role`,
`content` (a string) and, if the model wrote them, `reasoning_content` and `tool_calls`. `tuner.as_model_function()` is
the model being trained; `as_model_function` makes one from a client or any coroutine, so that one agent serves for a
script, an evaluation and training alike.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Protocol, cast

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion

Message = dict[str, Any]
ToolSchema = dict[str, Any]


class ModelFunction(Protocol):
    """Awaits one model call. Raises what its client raises; an agent never turns that into a reply."""

    async def __call__(
        self, messages: list[Message], *, tools: list[ToolSchema] | None = None, **sampling: Any
    ) -> Message: ...


def as_model_function(source: Any, model: str = "") -> ModelFunction:
    """The model function of an `openai.OpenAI` or `openai.AsyncOpenAI`, whose model is `model`; a coroutine function is
    one already."""
    if callable(source):
        return cast(ModelFunction, source)
    from openai import AsyncOpenAI, OpenAI

    if not isinstance(source, AsyncOpenAI | OpenAI):
        raise ConfigError(
            "a model function is `async def model(messages, *, tools=None, **sampling) -> message`, or made from an "
            f"OpenAI client; this is of type {type(source).__name__}"
        )
    model = model or getattr(source, "default_model", "")
    if not model:
        raise ConfigError("as_model_function needs the name of the model that this client should ask")
    return OpenAIModelFunction(source, model)


class OpenAIModelFunction:
    """A model that OpenAI's client reaches."""

    def __init__(self, client: openai.AsyncOpenAI | openai.OpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def __call__(
        self, messages: list[Message], *, tools: list[ToolSchema] | None = None, **sampling: Any
    ) -> Message:
        if sampling.get("stream") or (sampling.get("n") or 1) != 1:
            raise TypeError("a model function returns one whole message: it takes neither stream nor n")
        from openai import OpenAI

        create: Any = self._client.chat.completions.create
        arguments = _arguments({"model": self._model, "messages": messages, "tools": tools, **sampling})
        blocking = isinstance(self._client, OpenAI)
        return _message(await (asyncio.to_thread(create, **arguments) if blocking else create(**arguments)))


def _arguments(request: dict[str, Any]) -> dict[str, Any]:
    """The request as arguments of `create`, which takes fields it doesn't know in `extra_body`."""
    from openai.resources.chat import AsyncCompletions

    known = inspect.signature(AsyncCompletions.create).parameters
    arguments = {key: value for key, value in request.items() if key in known and value is not None}
    if further := {key: value for key, value in request.items() if key not in known and value is not None}:
        arguments["extra_body"] = {**further, **arguments.get("extra_body", {})}
    return arguments


def _message(reply: ChatCompletion) -> Message:
    written = reply.choices[0].message
    message: Message = {"role": "assistant", "content": written.content or ""}
    if reasoning := getattr(written, "reasoning_content", None):
        message["reasoning_content"] = reasoning
    if written.tool_calls:
        message["tool_calls"] = [call.model_dump(exclude_none=True) for call in written.tool_calls]
    return message
