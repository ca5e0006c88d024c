"""`RemoteEngine`: a model served by an OpenAI-compatible server that we don't run.

If the server takes and returns token ids (vLLM's does), this is an exact engine like any other, except that its weights
can't be changed: `/v1/completions` carries token ids both ways. Otherwise it offers `reply` only, over
`/v1/chat/completions`: it can be a helper or chat in a debug run, but can't be trained.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, ValidationError, convert

from ajet.engine.base import EnginePlacement, OnTokens, check_request, reply_deadline
from ajet.engine.model_source import ModelSource
from ajet.engine.remote_client import RemoteClient, RemoteSettings
from ajet.schema.chat import (
    ChatReply,
    ChatRequest,
    Completion,
    EngineCapabilities,
    FinishReason,
    GenerateRequest,
    Message,
    ReplyFinish,
    Sampling,
    TokenChunk,
)
from ajet.schema.errors import (
    EngineError,
    FeatureUnavailableError,
    InvalidRequestError,
    ModelCallError,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

SAMPLES = (
    "Hello, world!\n",
    "def f(x):\n    return x**2  # 3.14",
    "数学 и языки: ñ, ü, 🙂",
    "<|im_start|>user</think>",
)
"""Texts that two tokenizers with different vocabularies hardly ever split alike."""

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
    routed_experts: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _RemoteAnswer(Struct):
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
    """Builds a completion from one answer or from many events, and passes new tokens on."""

    def __init__(self, request: GenerateRequest, version: int, on_tokens: OnTokens | None = None) -> None:
        self._request = request
        self._on_tokens = on_tokens
        self._versions = [(0, version)]
        self._finish: FinishReason | None = None
        self._stopped_by: str | int | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._tops: list[list[tuple[int, float]]] = []
        self._cached = 0
        self._experts: NDArray[np.int16] | None = None

    def note_version(self, version: int) -> None:
        """Tokens read from now on were sampled under these weights."""
        if version != self._versions[-1][1]:
            started = len(self.token_ids)
            self._versions = [*(self._versions if started else []), (started, version)]

    def read(self, content: Mapping[str, Any]) -> None:
        """Read an answer or event."""
        try:
            answer = convert(content, _RemoteAnswer)
        except ValidationError as error:
            raise NoTokenIdsError(f"the server's answer doesn't have the form of vLLM's: {error}") from error
        if answer.error is not None:
            raise _error_in_stream(answer.error)
        if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
            self._cached = answer.usage.prompt_tokens_details.cached_tokens or self._cached
        if not answer.choices:
            return
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
        if choice.routed_experts is not None:
            self._experts = _experts(choice.routed_experts, len(self._request.prompt_ids) + len(self.token_ids) - 1)
        if choice.finish_reason:
            self._finish = _finish_reason(choice.finish_reason)
            self._stopped_by = choice.stop_reason
        if ids and self._on_tokens is not None:
            self._on_tokens(TokenChunk(list(ids), logprobs))

    def completion(self) -> Completion:
        """The completion, once the server has said how it ended."""
        if self._finish is None or not self.token_ids:
            raise EngineError("the server's answer is incomplete: it has no tokens or no finish_reason")
        stopped_by = self._stopped_by
        if self._finish == "stop" and stopped_by is None:
            stopped_by = self.token_ids[-1]  # an end token: the server names only stops that the request asked for
        tops = self._tops if self._request.top_logprobs else None
        return Completion(
            self.token_ids, self.logprobs, self._finish, stopped_by, self._versions, tops, self._cached, self._experts
        )


def _experts(text: str, tokens: int) -> NDArray[np.int16]:
    """The experts that vLLM says it chose: [token, layer, chosen] of all tokens but the last, as a .npy in base64."""
    try:
        found = np.lib.format.read_array(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EngineError(f"the server's routed_experts are no array: {error}") from error
    if found.ndim != 3 or len(found) != tokens or found.dtype.kind not in "iu":
        raise EngineError(
            f"the server's routed_experts are {found.dtype} of shape {found.shape}; expected were whole numbers for "
            f"{tokens} tokens"
        )
    return found.astype(np.int16)


def _error_in_stream(error: Any) -> ModelCallError:
    """Return the exception for an error that vLLM sends where a stream's events should be, after status 200."""
    details = error if isinstance(error, dict) else {"message": error}
    if details.get("code") == 400:
        return InvalidRequestError(f"the server refused the request: {details.get('message')}")
    return EngineError(f"the server failed: {details.get('message')}")


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
    body: dict[str, Any] = {"model": model, "messages": list(request.messages), **fields}
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
    finish: ReplyFinish = "length" if is_cut else "tool_calls" if choice.message.tool_calls else "stop"
    empty = Completion([], [], "length" if is_cut else "stop")
    usage = answer.usage or _ChatUsage()
    counted = (usage.prompt_tokens, usage.completion_tokens)
    name = str(answer.id or uuid.uuid4().hex)
    return ChatReply(name, message, finish, message["content"], [], empty, counted=counted)


class RemoteEngine:
    """An `Engine` over HTTP, and a chat model."""

    @classmethod
    def from_config(cls, config: Any, placement: EnginePlacement) -> RemoteEngine:
        """Read `ajet.rollout.remote`."""
        return cls(RemoteSettings.from_config(config), config.ajet.model.path)

    def __init__(self, settings: RemoteSettings, path: str | None = None) -> None:
        """`path`: the model whose tokenizer is used here; None if it is surely the server's."""
        self._settings = settings
        self._path = path
        self._client = RemoteClient(settings)
        self._exact: bool | None = None
        self._probing = asyncio.Lock()

    @property
    def capabilities(self) -> EngineCapabilities:
        """`exact_tokens` is known once `ready` has asked the server; until then it is False."""
        return EngineCapabilities("remote", exact_tokens=bool(self._exact), max_model_len=self._settings.max_model_len)

    async def ready(self) -> None:
        """Find out whether the server returns token ids."""
        async with self._probing:
            if self._exact is None:
                exact = await self._returns_token_ids()
                self._exact = exact and (self._path is None or await self._has_tokenizer(self._path))

    async def _has_tokenizer(self, path: str) -> bool:
        """Whether the server splits text as the model of `path` does, so that both mean the same by a token id. A
        server that can't be asked counts as such."""
        tokenizer = await asyncio.to_thread(ModelSource.resolve(path).tokenizer)
        roots = [
            replace(one, base_url=one.base_url.rstrip("/").removesuffix("/v1")) for one in self._settings.endpoints
        ]
        client = RemoteClient(replace(self._settings, endpoints=tuple(roots), max_attempts=1))
        asked = {"model": self._settings.model, "add_special_tokens": False}
        try:
            answers = [(await client.post("/tokenize", {**asked, "prompt": text})).get("tokens") for text in SAMPLES]
        except (EngineError, InvalidRequestError) as error:
            log.info("whether the server has the tokenizer of %s isn't checked: %s", path, error)
            return True
        finally:
            await client.aclose()
        own = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in SAMPLES]
        if not all(isinstance(said, list) and said and all(type(each) is int for each in said) for said in answers):
            return True  # it has another form
        if answers == own:
            return True
        log.warning(
            "the server of %r has another tokenizer than ajet.model.path (%s): it gets messages, and no tokens are "
            "recorded; for those, set model.path to the model that it serves",
            self._settings.model,
            path,
        )
        return False

    async def _returns_token_ids(self) -> bool:
        request = GenerateRequest([1], Sampling(temperature=0.0))
        reader = CompletionReader(request, 0)
        try:
            reader.read(await self._client.post("/completions", completion_body(request, self._settings.model, 1)))
        except (InvalidRequestError, NoTokenIdsError):  # no such path, or unknown fields: a server for chat only
            return False
        return bool(reader.token_ids)

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        reader = CompletionReader(request, 0, on_tokens)
        async with reply_deadline(request):
            await self.ready()
            body = self._body(request)
            if on_tokens is None:
                reader.read(await self._client.post("/completions", body, sticky=request.session_id))
            else:
                await self._client.stream("/completions", body, reader.read, sticky=request.session_id)
        return reader.completion()

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        if not self._exact:
            raise EngineError(
                f"the server of {self._settings.model!r} does not return token ids, so it can't be an engine: "
                "use it as a helper (debug_model=…), or serve the model with vLLM"
            )
        room = check_request(request, max_model_len=self._settings.max_model_len)
        return completion_body(request, self._settings.model, room)

    async def reply(self, request: ChatRequest) -> ChatReply:
        """Answer a chat request. The reply has no token ids."""
        return chat_reply(await self._client.post("/chat/completions", chat_body(request, self._settings.model)))

    async def load_weights(self, source: Any, version: int) -> None:
        raise FeatureUnavailableError("a remote server's weights can't be changed: use rollout.engine: vllm")

    async def pause(self) -> None:
        """Nothing to do: the server doesn't share our GPU."""

    async def resume(self) -> None:
        """See `pause`."""

    async def aclose(self) -> None:
        await self._client.aclose()
