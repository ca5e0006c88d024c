"""`TrinityEngine`: Trinity's rollout models as our `Engine`. Token ids in, token ids and logprobs out.

vLLM and SGLang are asked through the OpenAI-compatible server that Trinity starts for each engine, with token ids as
prompt; our own engine on the CPU is a Ray actor, asked directly. Each reply carries the policy version that was served
when it began: if weights change meanwhile, that is the older one, so staleness is never understated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ajet.backbone.ray.engine import RayEngine
from ajet.engine.base import OnTokens
from ajet.engine.remote import RemoteEngine
from ajet.engine.remote_client import Endpoint, RemoteSettings
from ajet.schema.generation import Completion, GenerateRequest, TokenChunk


class TrinityEngine(RayEngine):
    """Asks one of Trinity's rollout models."""

    def __init__(
        self, model: Any, *, max_model_len: int, embedded: bool, on_death: Callable[[BaseException], None]
    ) -> None:
        """`model`: Trinity's `ModelWrapper`."""
        super().__init__("Trinity", max_model_len=max_model_len, on_death=on_death)
        self._actor = model.model
        self._server: RemoteEngine | None = None
        if not embedded:
            endpoint = Endpoint(f"{str(model.api_address).rstrip('/')}/v1", model.api_key)
            self._server = RemoteEngine(RemoteSettings((endpoint,), model.model_path, max_model_len=max_model_len))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Draw one reply."""
        if self._server is not None:
            version = int(await self.answer(self._actor.get_model_version.remote(), request.deadline_s))
            completion = await self._server.generate(request, on_tokens)
            completion.versions = [(0, version)]
            return completion
        asked = self._actor.draw.remote(replace(request, deadline_s=None))
        completion = await self.answer(asked, request.deadline_s)
        if on_tokens is not None:
            on_tokens(TokenChunk(completion.token_ids, completion.logprobs))
        return completion

    async def aclose(self) -> None:
        """Only our connection to the models ends."""
        if self._server is not None:
            await self._server.aclose()
