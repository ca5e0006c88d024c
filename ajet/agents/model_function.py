"""`ModelFunction`: all that an agent needs of a model, with the functions that reach OpenAI's and Anthropic's clients.

async def model(messages, *, tools=None, **sampling) -> message

`messages`, `tools` and the returned assistant message are plain dicts in OpenAI's form; the message has `role`,
`content` (a string) and, if the model wrote them, `reasoning_content` and `tool_calls`. `tuner.as_model_function()` is
the model being trained; `as_model_function` makes one from a client, an address or any function, so that one agent
serves for a script, an evaluation and training alike.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakKeyDictionary

from ajet.schema.errors import ConfigError, EngineError
from ajet.schema.trajectory import StopReason, Usage

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion

NO_ANSWER: Mapping[str, StopReason] = {
    **dict.fromkeys(("length", "max_tokens", "model_length", "model_context_window_exceeded"), StopReason.REPLY_CUT),
    **dict.fromkeys(("content_filter", "refusal", "sensitive"), StopReason.REFUSED),
}
"""The finish reasons of replies that are no answer, as servers spell them."""
UNFINISHED = frozenset({"abort", "aborted", "error", "network_error", "insufficient_system_resource", "pause_turn"})
"""The finish reasons with which a server says that it gave up."""


class ModelMessage(dict[str, Any]):
    """An assistant message, as a plain dict, with what is known about its call besides."""

    usage: Usage | None = None
    finish_reason: str = "stop"
    reply_id: str = ""
    malformed: tuple[str, ...] = ()
    """What the server's parser could not read of the model's tool calls."""

    @property
    def no_answer(self) -> StopReason | None:
        """Why it is not an answer, whatever it says. None: nothing speaks against it."""
        return StopReason.REFUSED if self.get("refusal") else NO_ANSWER.get(self.finish_reason)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call, as the model asked for it."""

    name: str
    arguments: str | dict[str, Any]
    """Text, if the model wrote text: whether it is JSON that fits the schema is found out when the tool is called."""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class AgentReply:
    """A reply: tool calls, or an answer, or something that can't be read."""

    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    problem: str = ""
    """The message to the model if its reply can't be parsed: what was expected, and how to write it."""


def joined_text(content: Any) -> Any:
    """The text of a list of text parts; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content


def text_of(message: Mapping[str, Any]) -> str:
    """A message's text; of other parts than text, what they are."""
    return str(joined_text(message.get("content")) or "")


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
    """A function that was given as a model returned something that is not a reply."""


def as_model_function(source: Any, model: str = "", *, api_key: str | None = None) -> ModelFunction:
    """The model function of an OpenAI or Anthropic client (blocking or not) or of a base URL, whose model is `model`;
    or of a function, async or not, that returns text or a message and takes `tools` and sampling only if it wants them.
    Only an argument `tools` says that it passes them on: one that takes any keyword may do nothing with them.

    `api_key`: for a base URL; default: the environment's OPENAI_API_KEY.
    """
    if isinstance(source, str):
        if not source.startswith(("http://", "https://")):
            raise ConfigError(f"{EXPECTED}; {source!r} is not a URL. Write, for example, http://localhost:8000/v1")
        key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        return AddressModelFunction(source, key, _named(model))
    if callable(source):
        if hasattr(source, "takes_tools"):  # made here before
            return cast(ModelFunction, source)
        return FunctionModel(source, model)
    model = model or getattr(source, "default_model", "")
    if hasattr(getattr(getattr(source, "chat", None), "completions", None), "create"):
        return OpenAIModelFunction(source, _named(model))
    if hasattr(getattr(source, "messages", None), "create"):
        return AnthropicModelFunction(source, _named(model))
    raise ConfigError(f"{EXPECTED}; this is of type {type(source).__name__}")


def _named(model: str) -> str:
    if not model:
        raise ConfigError("as_model_function needs the name of the model that this client should ask")
    return model


class FunctionModel:
    """A plain function as a model. A blocking one runs in a thread."""

    def __init__(self, function: Any, model: str = "") -> None:
        self.model = model or str(getattr(function, "__name__", type(function).__name__))
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        self._any = any(entry.kind is entry.VAR_KEYWORD for entry in parameters)
        self._takes = {entry.name for entry in parameters if entry.kind is not entry.POSITIONAL_ONLY}
        self.takes_tools = "tools" in self._takes

    async def __call__(
        self, messages: list[Message], *, tools: list[ToolSchema] | None = None, **sampling: Any
    ) -> Message:
        given = {**({"tools": tools} if tools else {}), **sampling}
        taken = given if self._any else {key: value for key, value in given.items() if key in self._takes}
        # as a partial, it counts as async only if it is so itself: what a decorator wrapped may be
        return as_message(await _called(partial(self._function, messages, **taken)))


async def _called(function: Any, *arguments: Any, **named: Any) -> Any:
    """What a function returns, in a thread unless it is async: it may block."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return await function(*arguments, **named)
    value = await asyncio.to_thread(function, *arguments, **named)
    return await value if inspect.isawaitable(value) else value


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
        arguments = _arguments({"model": self.model, "messages": messages, "tools": tools, **sampling})
        return message_of(await _called(self.client().chat.completions.create, **arguments))

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
        raise EngineError(f"the model's server's answer is not a reply: {reply!r:.300}")
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


DEFAULT_MAX_TOKENS = 4096
"""Anthropic's API asks for a maximum."""
_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length", None: "stop"}


class AnthropicModelFunction:
    """A model function over `anthropic.Anthropic` or `anthropic.AsyncAnthropic`."""

    takes_tools = True

    def __init__(self, client: Any, model: str) -> None:
        self.model = model
        self._client = client

    async def __call__(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> ModelMessage:
        request = {"model": self.model, **_conversation(messages), **_sampling(sampling, bool(tools))}
        if tools:
            request["tools"] = [_tool(tool) for tool in tools]
        return _message(await _called(self._client.messages.create, **request))


def _sampling(given: dict[str, Any], has_tools: bool) -> dict[str, Any]:
    given = {key: value for key, value in given.items() if value is not None}
    request: dict[str, Any] = {}
    request["max_tokens"] = given.pop("max_completion_tokens", None) or given.pop("max_tokens", DEFAULT_MAX_TOKENS)
    given.pop("max_tokens", None)
    if stop := given.pop("stop", None):
        request["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if given.pop("parallel_tool_calls", True) is False and has_tools:
        request["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    if given.get("tool_choice") == "none":
        request["tool_choice"] = {"type": given.pop("tool_choice")}
    return {**request, **given}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    made = {"name": function["name"], "input_schema": function.get("parameters") or {"type": "object"}}
    return {**made, **({"description": function["description"]} if function.get("description") else {})}


def _conversation(messages: Sequence[Message]) -> dict[str, Any]:
    """`system` and `messages`. Tool results are blocks of a user message; neighbours of one role become one message."""
    system = [_plain_text(message) for message in messages if message["role"] == "system"]
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system":
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = _blocks(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return {"messages": turns, **({"system": "\n\n".join(system)} if system else {})}


def _blocks(message: Message) -> list[dict[str, Any]]:
    text = _plain_text(message)
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
    blocks: list[dict[str, Any]] = list(message.get("anthropic_thinking") or ())  # must come back as it was
    if text.strip():  # the API refuses empty text
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        blocks.append({
            "type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"]),
        })  # fmt: skip
    return blocks


def _plain_text(message: Message) -> str:
    text = joined_text(message.get("content") or "")
    if not isinstance(text, str):
        raise ConfigError(f"with a client of Anthropic's, messages are text; this one holds other parts: {text!r:.200}")
    return text


def _input(arguments: Any) -> Any:
    """The arguments as an object, which the API insists on: a model's broken JSON goes back as text within one."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _message(reply: Any) -> ModelMessage:
    texts, thinking, calls = [], [], []
    for block in reply.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type in ("thinking", "redacted_thinking"):
            thinking.append(block)
    message = ModelMessage(role="assistant", content="".join(texts))
    if thinking:
        message["reasoning_content"] = "".join(getattr(block, "thinking", "") for block in thinking)
        message["anthropic_thinking"] = [block.model_dump(exclude_none=True) for block in thinking]
    if calls:
        message["tool_calls"] = calls
    message.usage = Usage(reply.usage.input_tokens, reply.usage.output_tokens)
    message.finish_reason = _FINISH.get(reply.stop_reason, reply.stop_reason)
    message.reply_id = reply.id
    return message
