"""`RemoteEngine`: a model served by an OpenAI-compatible server that we don't run.

If the server takes and returns token ids (vLLM's does), this is an exact engine like any other, except that its weights
can't be changed. Otherwise it offers `reply` only: it can be a helper or chat in a debug run, but can't be trained.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ajet.engine.base import OnTokens
from ajet.engine.remote.client import RemoteClient, RemoteSettings
from ajet.engine.remote.completions import CompletionReader, NoTokenIdsError, chat_body, chat_reply, completion_body
from ajet.engine.sampling_rules import check_request
from ajet.schema.chat import ChatReply, ChatRequest
from ajet.schema.errors import EngineError, FeatureUnavailableError, GenerationTimeoutError, InvalidRequestError
from ajet.schema.generation import Completion, EngineCapabilities, GenerateRequest, Sampling, TokenChunk


class RemoteEngine:
    """An `Engine` over HTTP, and a chat model."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._client: RemoteClient | None = None
        self._exact: bool | None = None
        self._probing = asyncio.Lock()
        self._closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        """`exact_tokens` is known once `ready` has asked the server; until then it is False."""
        return EngineCapabilities("remote", exact_tokens=bool(self._exact), max_model_len=self._settings.max_model_len)

    @property
    def client(self) -> RemoteClient:
        if self._closed:
            raise EngineError("the remote engine is closed")
        if self._client is None:
            self._client = RemoteClient(self._settings)
        return self._client

    async def ready(self) -> None:
        """Find out whether the server returns token ids."""
        async with self._probing:
            if self._exact is None:
                self._exact = await self._returns_token_ids()

    async def _returns_token_ids(self) -> bool:
        request = GenerateRequest([1], Sampling(temperature=0.0))
        reader = CompletionReader(request, 0)
        try:
            reader.read(await self.client.post("/completions", completion_body(request, self._settings.model, 1)))
        except (InvalidRequestError, NoTokenIdsError):  # no such path, or unknown fields: a server for chat only
            return False
        return bool(reader.token_ids)

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        await self.ready()
        if not self._exact:
            raise EngineError(
                f"the server of {self._settings.model!r} does not return token ids, so it can't be an engine: "
                "use it as a helper (debug_model=…), or serve the model with vLLM"
            )
        room = check_request(request, max_model_len=self._settings.max_model_len)
        body = completion_body(request, self._settings.model, room)
        reader = CompletionReader(request, 0)
        try:
            async with asyncio.timeout(request.deadline_s):
                if on_tokens is None:
                    reader.read(await self.client.post("/completions", body, sticky=request.session_id))
                else:
                    await self._stream(body, reader, on_tokens, request.session_id)
        except TimeoutError as error:
            raise GenerationTimeoutError(f"no reply within its deadline of {request.deadline_s:.1f} s") from error
        return reader.completion()

    async def _stream(self, body: dict[str, Any], reader: CompletionReader, on_tokens: OnTokens, sticky: str) -> None:
        def on_event(event: dict[str, Any]) -> None:
            ids, logprobs = reader.read(event)
            if ids:
                on_tokens(TokenChunk(list(ids), logprobs))

        await self.client.stream("/completions", body, on_event, sticky=sticky)

    async def reply(self, request: ChatRequest) -> ChatReply:
        """Answer a chat request. The reply has no token ids."""
        return chat_reply(await self.client.post("/chat/completions", chat_body(request, self._settings.model)))

    async def load_weights(self, source: Any, version: int) -> None:
        raise FeatureUnavailableError("a remote server's weights can't be changed: use rollout.engine: vllm")

    async def pause(self) -> None:
        """Nothing to do: the server doesn't share our GPU."""

    async def resume(self) -> None:
        """See `pause`."""

    async def aclose(self) -> None:
        self._closed = True
        if self._client is not None:
            await self._client.aclose()
