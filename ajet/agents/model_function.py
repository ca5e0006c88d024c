"""The model function: all that an agent needs of a model.

    async def model(messages, *, tools=None, **sampling) -> message

`messages`, `tools` and the returned assistant message are plain dicts in OpenAI's form; the message has `role`,
`content` (a string) and, if the model wrote them, `reasoning_content` and `tool_calls`. `tuner.as_model_function()` is
the model being trained; `as_model_function` makes one from a client, an address or any function, so that one agent
serves for a script, an evaluation and training alike.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from typing import Any, Protocol, cast

from ajet.agents.reply import ModelMessage, joined_text
from ajet.schema.errors import ConfigError
from ajet.schema.trajectory import Usage

Message = dict[str, Any]
ToolSchema = dict[str, Any]
EXPECTED = (
    "a model function is `async def model(messages, *, tools=None, **sampling) -> message`, or made from an OpenAI or "
    "Anthropic client, or from a base URL with the name of a model"
)


class ModelFunction(Protocol):
    """Awaits one model call. Raises what its client raises; an agent never turns that into a reply."""

    takes_tools: bool
    """Whether it passes `tools` on to the model."""

    async def __call__(
        self, messages: list[Message], *, tools: list[ToolSchema] | None = None, **sampling: Any
    ) -> Message: ...


class ModelReplyError(ConfigError):
    """A function that was given as a model returned something that is no reply."""


def as_model_function(source: Any, model: str = "", *, api_key: str | None = None) -> ModelFunction:
    """The model function of an OpenAI or Anthropic client (blocking or not) or of a base URL, whose model is `model`;
    or of a function, async or not, that returns text or a message and takes `tools` and sampling only if it wants them.
    Only an argument `tools` says that it passes them on: one that takes any keyword may do nothing with them.

    `api_key`: for a base URL; default: the environment's OPENAI_API_KEY.
    """
    if isinstance(source, str):
        return _at_address(source, model, api_key)
    if callable(source):
        if hasattr(source, "takes_tools"):  # made here before
            return cast(ModelFunction, source)
        return FunctionModel(source, model)
    model = model or getattr(source, "default_model", "")
    if hasattr(getattr(getattr(source, "chat", None), "completions", None), "create"):
        from ajet.agents.openai_model import OpenAIModelFunction

        return OpenAIModelFunction(source, _named(model))
    if hasattr(getattr(source, "messages", None), "create"):
        from ajet.agents.anthropic_model import AnthropicModelFunction

        return AnthropicModelFunction(source, _named(model))
    raise ConfigError(f"{EXPECTED}; this is of type {type(source).__name__}")


def _named(model: str) -> str:
    if not model:
        raise ConfigError("as_model_function needs the name of the model that this client should ask")
    return model


def _at_address(address: str, model: str, api_key: str | None) -> ModelFunction:
    from ajet.agents.openai_model import AddressModelFunction

    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{EXPECTED}; {address!r} is no URL. Write, for example, http://localhost:8000/v1")
    key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
    return AddressModelFunction(address, key, _named(model))


class FunctionModel:
    """A plain function as a model. A blocking one runs in a thread."""

    def __init__(self, function: Any, model: str = "") -> None:
        self.model = model or str(getattr(function, "__name__", type(function).__name__))
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._any = any(entry.kind is entry.VAR_KEYWORD for entry in parameters)
        self._takes = {entry.name for entry in parameters if entry.kind is not entry.POSITIONAL_ONLY}
        self.takes_tools = "tools" in self._takes
        called = function if inspect.isroutine(function) else function.__call__
        self._blocking = not inspect.iscoroutinefunction(called)

    async def __call__(
        self, messages: list[Message], *, tools: list[ToolSchema] | None = None, **sampling: Any
    ) -> Message:
        given = {**({"tools": tools} if tools else {}), **sampling}
        taken = given if self._any else {key: value for key, value in given.items() if key in self._takes}
        if self._blocking:
            reply = await asyncio.to_thread(self._function, messages, **taken)
            reply = await reply if inspect.isawaitable(reply) else reply
        else:
            reply = await self._function(messages, **taken)
        return as_message(reply)


def as_message(reply: Any) -> ModelMessage:
    """What a function returned as a message: text, a message, or a client library's whole answer.

    Raises ModelReplyError: nothing else is taken for a reply, and no reply for an empty one.
    """
    if isinstance(reply, ModelMessage):
        return reply
    if isinstance(reply, str):
        message = ModelMessage(role="assistant", content=str(reply))
        message.finish_reason = getattr(reply, "finish_reason", None) or "stop"
        return message
    if hasattr(reply, "choices"):
        from ajet.agents.openai_model import message_of

        return message_of(reply)
    if hasattr(reply, "model_dump"):
        reply = reply.model_dump(exclude_none=True)
    if isinstance(reply, dict) and ("content" in reply or "tool_calls" in reply):
        return _checked(dict(reply))
    text = getattr(reply, "text", getattr(reply, "content", None))
    if isinstance(text, str):
        return ModelMessage(role="assistant", content=text)
    raise ModelReplyError(
        f"the model function returned {reply!r:.100} of type {type(reply).__name__}: expected text, or a message with "
        "`content` or `tool_calls`"
    )


def _checked(message: dict[str, Any]) -> ModelMessage:
    usage, finish = message.pop("usage", None), message.pop("finish_reason", None)
    made = ModelMessage({**message, "role": "assistant", "content": message.get("content") or ""})
    made["content"] = joined_text(made["content"])
    if not isinstance(made["content"], str):
        raise ModelReplyError(f"a reply's content must be text, not {type(made['content']).__name__}")
    calls = made.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ModelReplyError("a reply's tool_calls must be a list of mappings")
    if isinstance(usage, dict):
        made.usage = Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    made.finish_reason = str(finish or "stop")
    return made
