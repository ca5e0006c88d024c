"""`SglangEngine`: token ids over `/generate` of a running SGLang server. Experimental: tested against a stand-in only.

The servers' addresses are those of `rollout.remote`. New weights must be in a folder that the servers can read.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from typing import Any

from msgspec import Struct, ValidationError, convert

from ajet.engine.base import EnginePlacement, OnTokens, RequestGate, check_request, reply_deadline, weights_folder
from ajet.engine.remote_client import RemoteClient, RemoteSettings
from ajet.schema.chat import Completion, EngineCapabilities, FinishReason, GenerateRequest, TokenChunk
from ajet.schema.errors import EngineError

ABORT_SECONDS = 1.0
"""How long a request that nobody waits for any more may take to be aborted."""


class SglangEngine:
    """An `Engine` over one or several SGLang servers with the same model."""

    @classmethod
    def from_config(cls, config: Any, placement: EnginePlacement) -> SglangEngine:
        """Read `ajet.rollout.remote`."""
        return cls(RemoteSettings.from_config(config))

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._client = RemoteClient(settings)
        self._version = 0
        self._gate = RequestGate()

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("sglang", load_weights=True, max_model_len=self._settings.max_model_len)

    async def ready(self) -> None:
        """Generate one token: nothing less proves that a server works."""
        await self._client.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        room = check_request(request, max_model_len=self._settings.max_model_len)
        async with reply_deadline(request), self._gate.request():
            completion = await self._generate(request, room)
        if on_tokens is not None:
            on_tokens(TokenChunk(completion.token_ids, completion.logprobs))
        return completion

    async def _generate(self, request: GenerateRequest, room: int) -> Completion:
        name = uuid.uuid4().hex
        try:
            body = generate_body(request, room, name)
            answer = await self._client.post("/generate", body, sticky=request.session_id)
        except asyncio.CancelledError:
            with suppress(EngineError, TimeoutError):  # a server that can't be told ends the request by itself
                async with asyncio.timeout(ABORT_SECONDS):
                    await self._client.control("/abort_request", {"rid": name})
            raise
        return read_answer(answer, request, self._version)

    async def load_weights(self, source: Any, version: int) -> None:
        folder = str(weights_folder(source).resolve())
        await self._client.control("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})
        self._version = version

    async def pause(self) -> None:
        await self._gate.close()

    async def resume(self) -> None:
        self._gate.open()

    async def aclose(self) -> None:
        await self._client.aclose()


def generate_body(request: GenerateRequest, room: int, name: str) -> dict[str, Any]:
    """The body of a request to `/generate`."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": room,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    return {
        "rid": name,
        "input_ids": request.prompt_ids,
        "sampling_params": parameters,
        "return_logprob": True,
        "top_logprobs_num": request.top_logprobs,
    }


_TokenLogprob = tuple[float, int, Any]
"""Logprob, id, text."""


class _Finish(Struct):
    type: str
    matched: int | str | None = None


class _MetaInfo(Struct):
    output_token_logprobs: list[_TokenLogprob]
    finish_reason: _Finish
    output_top_logprobs: list[list[_TokenLogprob]] | None = None
    cached_tokens: int | None = None


class _SglangAnswer(Struct):
    meta_info: _MetaInfo


def read_answer(content: dict[str, Any], request: GenerateRequest, version: int) -> Completion:
    """The completion in an answer of `/generate`."""
    try:
        meta = convert(content, _SglangAnswer).meta_info
    except ValidationError as error:
        raise EngineError(f"the server's answer doesn't have SGLang's form ({error}): {str(content)[:300]}") from error
    if not meta.output_token_logprobs:
        raise EngineError("the server generated no token")
    ids = [token for _, token, _ in meta.output_token_logprobs]
    logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    reason = reasons.get(meta.finish_reason.type, "abort")
    stopped_by = meta.finish_reason.matched if reason == "stop" else None
    if reason == "stop" and stopped_by is None:
        stopped_by = ids[-1]
    tops = None
    if request.top_logprobs:
        tops = [[(token, logprob) for logprob, token, _ in row] for row in meta.output_top_logprobs or []]
    return Completion(ids, logprobs, reason, stopped_by, [(0, version)], tops, meta.cached_tokens or 0)
