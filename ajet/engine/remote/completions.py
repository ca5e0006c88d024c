"""Token ids in, token ids out over `/v1/completions`, as vLLM's server speaks it (`return_token_ids`)."""

from __future__ import annotations

import uuid
from typing import Any

from ajet.engine.remote.client import RemoteClient
from ajet.schema.chat import ChatReply, ChatRequest, Message, ReplyFinish
from ajet.schema.errors import EngineError
from ajet.schema.generation import Completion, FinishReason, GenerateRequest, Sampling


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The fields of a request that say how to draw; those that say nothing are left out."""
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
    return fields | {name: value for name, (value, said) in optional.items() if said}


def completion_body(request: GenerateRequest, model: str, max_tokens: int) -> dict[str, Any]:
    """A request for token ids and logprobs."""
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
    """Puts a completion together from one answer or from many events."""

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
        """What comes from now on was drawn under these weights."""
        if version != self._versions[-1][1]:
            started = len(self.token_ids)
            self._versions = [*(self._versions if started else []), (started, version)]

    def read(self, answer: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Take in an answer or event; returns what it adds."""
        if "error" in answer:
            raise EngineError(f"the server failed: {answer['error']}")
        usage = answer.get("usage") or {}
        self._cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self._cached
        if not answer.get("choices"):
            return [], []
        choice = answer["choices"][0]
        ids = choice.get("token_ids") or []
        written = choice.get("logprobs") or {}
        logprobs = [float(value) for value in written.get("token_logprobs") or []]
        if len(ids) != len(logprobs):
            raise EngineError(
                f"the server gave {len(ids)} token ids and {len(logprobs)} logprobs: it does not speak token ids "
                "(vLLM does, with return_token_ids)"
            )
        self.token_ids += ids
        self.logprobs += logprobs
        if self._request.top_logprobs:
            self._tops += [_top(entry) for entry in written.get("top_logprobs") or []]
        if choice.get("finish_reason"):
            self._finish = _finish_reason(choice["finish_reason"])
            self._stopped_by = choice.get("stop_reason")
        return ids, logprobs

    def completion(self) -> Completion:
        """The whole, once the server has said how it ended."""
        if self._finish is None or not self.token_ids:
            raise EngineError("the server's answer has no end: no finish_reason, or no tokens")
        stopped_by = self._stopped_by
        if self._finish == "stop" and stopped_by is None:
            stopped_by = self.token_ids[-1]  # an end token: the server names only what the request asked to stop at
        tops = self._tops if self._request.top_logprobs else None
        return Completion(self.token_ids, self.logprobs, self._finish, stopped_by, self._versions, tops, self._cached)


def _finish_reason(said: str) -> FinishReason:
    if said == "length":
        return "length"
    return "abort" if said == "abort" else "stop"


def _top(entry: dict[str, float] | None) -> list[tuple[int, float]]:
    """`{"token_id:17": -0.3, …}`, the likeliest first."""
    pairs = [(int(name.removeprefix("token_id:")), float(value)) for name, value in (entry or {}).items()]
    return sorted(pairs, key=lambda pair: -pair[1])


STANDARD = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "seed"})
"""What every OpenAI-compatible server understands; others may refuse a request with more."""


def chat_body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The request in OpenAI's form, with nothing in it that was not asked for."""
    fields = {name: value for name, value in sampling_fields(request.sampling).items() if name in STANDARD}
    body: dict[str, Any] = {"model": model, "messages": request.messages, **fields}
    if request.tools:
        body |= {"tools": request.tools, "tool_choice": request.tool_choice}
    if request.sampling.max_tokens is not None:
        body["max_tokens"] = request.sampling.max_tokens
    if request.response_format is not None:
        body["response_format"] = request.response_format
    return body


async def ask_chat(client: RemoteClient, request: ChatRequest, model: str, *, sticky: str = "") -> ChatReply:
    """One reply. It has no token ids: it can be read, never trained."""
    answer = await client.post("/chat/completions", chat_body(request, model), sticky=sticky)
    try:
        choice = answer["choices"][0]
        said = choice["message"]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"the server's answer holds no message: {str(answer)[:200]}") from error
    message: Message = {"role": "assistant", "content": said.get("content") or ""}
    for optional in ("reasoning_content", "tool_calls"):
        if said.get(optional):
            message[optional] = said[optional]
    finish = _finish(choice.get("finish_reason"), bool(said.get("tool_calls")))
    empty = Completion([], [], "length" if finish == "length" else "stop")
    name = str(answer.get("id") or uuid.uuid4().hex)
    return ChatReply(name, message, finish, message["content"], [], empty)


def _finish(said: str | None, calls_tools: bool) -> ReplyFinish:
    if calls_tools:
        return "tool_calls"
    return "length" if said == "length" else "stop"
