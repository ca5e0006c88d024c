"""`OpenAIModelFunction`: a model that OpenAI's client reaches, blocking or not."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ajet.agents.reply import ModelMessage, joined_text
from ajet.schema.errors import EngineError
from ajet.schema.trajectory import Usage

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion

Message = dict[str, Any]


class OpenAIModelFunction:
    """A model function."""

    takes_tools = True

    def __init__(self, client: openai.AsyncOpenAI | openai.OpenAI, model: str) -> None:
        self.model = model
        self._client = client

    async def __call__(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> ModelMessage:
        if sampling.get("stream") or (sampling.get("n") or 1) != 1:
            raise TypeError("a model function returns one whole message: it takes neither stream nor n")
        create: Any = self.client().chat.completions.create
        arguments = _arguments({"model": self.model, "messages": messages, "tools": tools, **sampling})
        if inspect.iscoroutinefunction(inspect.unwrap(create)):
            return message_of(await create(**arguments))
        reply = await asyncio.to_thread(create, **arguments)
        return message_of(await reply if inspect.isawaitable(reply) else reply)

    def client(self) -> openai.AsyncOpenAI | openai.OpenAI:
        """The client to ask."""
        return self._client


class AddressModelFunction(OpenAIModelFunction):
    """The model at a base URL, from any event loop: an HTTP client's connections belong to one."""

    def __init__(self, base_url: str, api_key: str, model: str) -> None:
        self.model = model
        self._address = base_url, api_key
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = WeakKeyDictionary()

    def client(self) -> openai.AsyncOpenAI:
        from openai import AsyncOpenAI

        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            base_url, api_key = self._address
            self._clients[loop] = AsyncOpenAI(base_url=base_url, api_key=api_key)
        return self._clients[loop]


def message_of(reply: ChatCompletion) -> ModelMessage:
    """The message of a chat completion, and what it cost. Raises EngineError if it is none."""
    choices = getattr(reply, "choices", None)  # the client's types promise more than every server says
    choice = choices[0] if choices else None
    written = getattr(choice, "message", None)
    content = joined_text(getattr(written, "content", None) or "")
    if written is None or not isinstance(content, str):
        raise EngineError(f"the model's server answered with what is no reply: {reply!r:.300}")
    message = ModelMessage(role="assistant", content=content)
    if reasoning := getattr(written, "reasoning_content", None):
        message["reasoning_content"] = reasoning
    if refusal := getattr(written, "refusal", None):
        message["refusal"] = refusal
    if written.tool_calls:
        message["tool_calls"] = [_plain(call) for call in written.tool_calls]
    counts: list[Any] = [getattr(reply.usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    message.usage = None if None in counts else Usage(*counts)
    message.finish_reason = getattr(choice, "finish_reason", None) or "stop"
    message.reply_id = getattr(reply, "id", None) or ""
    message.malformed = tuple(str(what) for what in getattr(choice, "malformed", None) or ())
    return message


def _plain(call: Any) -> dict[str, Any]:
    plain: dict[str, Any] = call if isinstance(call, dict) else call.model_dump(exclude_none=True)
    return plain


def _arguments(request: dict[str, Any]) -> dict[str, Any]:
    """The request as arguments of `create`, which takes fields it doesn't know in `extra_body`."""
    from openai.resources.chat import AsyncCompletions

    known = inspect.signature(AsyncCompletions.create).parameters
    arguments = {key: value for key, value in request.items() if key in known and value is not None}
    if further := {key: value for key, value in request.items() if key not in known and value is not None}:
        arguments["extra_body"] = {**further, **arguments.get("extra_body", {})}
    return arguments
