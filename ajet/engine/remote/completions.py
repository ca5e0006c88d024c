"""Requests and replies of OpenAI-compatible servers.

`/v1/completions` carries token ids both ways, as vLLM's server does with `return_token_ids`: its replies can be trained
on. `/v1/chat/completions` carries messages: its replies can only be read.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, ValidationError, convert

from ajet.schema.chat import ChatReply, ChatRequest, Message, ReplyFinish
from ajet.schema.errors import EngineError
from ajet.schema.generation import Completion, FinishReason, GenerateRequest, Sampling

STANDARD = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "seed"})
"""Sampling fields that every OpenAI-compatible server knows; some servers refuse requests with any other."""


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The sampling parameters of a request; those at their defaults are left out."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    optional = {
        "top_k": (sampling.top_k, sampling.top_k > 0),
        "min_p": (sampling.min_p, sampling.min_p > 0),
        "presence_penalty": (sampling.presence_penalty, sampling.presence_penalty != 0),
        "frequency_penalty": (sampling.frequency_penalty, sampling.frequency_penalty != 0),
        "repetition_penalty": (sampling.repetition_penalty, sampling.repetition_penalty != 1),
        "stop": (list(sampling.stop), bool(sampling.stop)),
        "stop_token_ids": (list(sampling.stop_token_ids), bool(sampling.stop_token_ids)),
        "seed": (sampling.seed, sampling.seed is not None),
        "ignore_eos": (True, sampling.ignore_eos),
    }
    return fields | {name: value for name, (value, given) in optional.items() if given}


# ---------------------------------------------------------------- token ids


class NoTokenIdsError(EngineError):
    """The server answers, but without the ids of its tokens."""


class _Logprobs(Struct):
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    """`{"token_id:17": -0.3, …}` per token."""


class _Choice(Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(Struct):
    """A whole answer, or one event of a stream."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


def completion_body(request: GenerateRequest, model: str, max_tokens: int) -> dict[str, Any]:
    """The body of a request for token ids and logprobs."""
    return {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": max_tokens,
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        **sampling_fields(request.sampling),
    }


class CompletionReader:
    """Builds a completion from one answer or from many events."""

    def __init__(self, request: GenerateRequest, version: int) -> None:
        self._request = request
        self._versions = [(0, version)]
        self._finish: FinishReason | None = None
        self._stopped_by: str | int | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._tops: list[list[tuple[int, float]]] = []
        self._cached = 0

    def note_version(self, version: int) -> None:
        """Tokens read from now on were sampled under these weights."""
        if version != self._versions[-1][1]:
            started = len(self.token_ids)
            self._versions = [*(self._versions if started else []), (started, version)]

    def read(self, content: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Read an answer or event; returns the ids and logprobs that it adds."""
        try:
            answer = convert(content, _Answer)
        except ValidationError as error:
            raise NoTokenIdsError(f"the server's answer doesn't have the form of vLLM's: {error}") from error
        if answer.error is not None:
            raise EngineError(f"the server failed: {answer.error}")
        if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
            self._cached = answer.usage.prompt_tokens_details.cached_tokens or self._cached
        if not answer.choices:
            return [], []
        choice = answer.choices[0]
        details = choice.logprobs or _Logprobs()
        ids, logprobs = choice.token_ids or [], details.token_logprobs or []
        if len(ids) != len(logprobs):
            raise NoTokenIdsError(
                f"the server sent {len(ids)} token ids and {len(logprobs)} logprobs: it does not return token ids "
                "(vLLM does, with return_token_ids)"
            )
        most = self._request.sampling.max_tokens
        if most is not None and len(self.token_ids) + len(ids) > most:
            raise EngineError(f"the server sent more than the {most} tokens that it was asked for")
        self.token_ids += ids
        self.logprobs += logprobs
        if self._request.top_logprobs:
            self._tops += [_ranked(row or {}) for row in details.top_logprobs or []]
        if choice.finish_reason:
            self._finish = _finish_reason(choice.finish_reason)
            self._stopped_by = choice.stop_reason
        return ids, logprobs

    def completion(self) -> Completion:
        """The completion, once the server has said how it ended."""
        if self._finish is None or not self.token_ids:
            raise EngineError("the server's answer is incomplete: it has no tokens or no finish_reason")
        stopped_by = self._stopped_by
        if self._finish == "stop" and stopped_by is None:
            stopped_by = self.token_ids[-1]  # an end token: the server names only stops that the request asked for
        tops = self._tops if self._request.top_logprobs else None
        return Completion(self.token_ids, self.logprobs, self._finish, stopped_by, self._versions, tops, self._cached)


def _finish_reason(name: str) -> FinishReason:
    if name == "length":
        return "length"
    return "abort" if name == "abort" else "stop"


def _ranked(row: dict[str, float]) -> list[tuple[int, float]]:
    """The likeliest first."""
    pairs = [(int(name.removeprefix("token_id:")), value) for name, value in row.items()]
    return sorted(pairs, key=lambda pair: -pair[1])


# ---------------------------------------------------------------- messages


class _ChatMessage(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _ChatChoice(Struct):
    message: _ChatMessage
    finish_reason: str | None = None


class _ChatUsage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ChatAnswer(Struct):
    choices: list[_ChatChoice]
    id: Any = None
    usage: _ChatUsage | None = None


def chat_body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The body of a chat request, with only the fields that were asked for."""
    fields = {name: value for name, value in sampling_fields(request.sampling).items() if name in STANDARD}
    body: dict[str, Any] = {"model": model, "messages": request.messages, **fields}
    if request.tools:
        body |= {"tools": request.tools, "tool_choice": request.tool_choice}
    if request.sampling.max_tokens is not None:
        body["max_tokens"] = request.sampling.max_tokens
    if request.response_format is not None:
        body["response_format"] = request.response_format
    return body


def chat_reply(content: Mapping[str, Any]) -> ChatReply:
    """The reply in a server's answer, without token ids."""
    try:
        answer = convert(content, _ChatAnswer)
        choice = answer.choices[0]
    except (ValidationError, IndexError) as error:
        raise EngineError(f"the server's answer holds no message: {str(content)[:200]}") from error
    message: Message = {"role": "assistant", "content": choice.message.content or ""}
    if choice.message.reasoning_content:
        message["reasoning_content"] = choice.message.reasoning_content
    if choice.message.tool_calls:
        message["tool_calls"] = choice.message.tool_calls
    is_cut = choice.finish_reason == "length"
    finish: ReplyFinish = "tool_calls" if choice.message.tool_calls else "length" if is_cut else "stop"
    empty = Completion([], [], "length" if is_cut else "stop")
    usage = answer.usage or _ChatUsage()
    counted = (usage.prompt_tokens, usage.completion_tokens)
    name = str(answer.id or uuid.uuid4().hex)
    return ChatReply(name, message, finish, message["content"], [], empty, counted=counted)
