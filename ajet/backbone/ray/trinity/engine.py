"""`TrinityEngine`: Trinity's rollout models as our `Engine`. Token ids in, token ids and logprobs out.

vLLM and SGLang are asked through the OpenAI-compatible server that Trinity starts for each engine, with token ids as
prompt; our own engine on the CPU is a Ray actor and asked directly. Each reply carries the policy version that was
served when it began: should weights change while it is drawn, that is the older one, so staleness is never understated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ajet.engine.base import OnTokens
from ajet.engine.remote.client import Endpoint, RemoteSettings
from ajet.engine.remote.engine import RemoteEngine
from ajet.schema.errors import EngineError, GenerationTimeoutError
from ajet.schema.generation import Completion, EngineCapabilities, GenerateRequest, TokenChunk


class TrinityEngine:
    """Asks one of Trinity's rollout models. `on_death` is told when its process is gone."""

    def __init__(
        self, model: Any, *, max_model_len: int, embedded: bool, on_death: Callable[[BaseException], None]
    ) -> None:
        """`model`: Trinity's `ModelWrapper`."""
        self._actor = model.model
        self._on_death = on_death
        self._server: RemoteEngine | None = None
        if not embedded:
            endpoint = Endpoint(f"{str(model.api_address).rstrip('/')}/v1", model.api_key)
            self._server = RemoteEngine(RemoteSettings((endpoint,), model.model_path, max_model_len=max_model_len))
        self.capabilities = EngineCapabilities("trinity", load_weights=False, max_model_len=max_model_len)

    async def ready(self) -> None:
        """Trinity starts its models before it starts us."""

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Draw one reply."""
        from ray.exceptions import RayActorError, RayError

        try:
            if self._server is not None:
                version = int(await self._actor.get_model_version.remote())
                completion = await self._server.generate(request, on_tokens)
                completion.versions = [(0, version)]
                return completion
            asked = replace(request, deadline_s=None)
            completion = await asyncio.wait_for(self._actor.draw.remote(asked), request.deadline_s)
        except TimeoutError:
            raise GenerationTimeoutError(f"no reply from Trinity's engine within {request.deadline_s:.0f} s") from None
        except RayActorError as error:
            self._on_death(error)
            raise EngineError(f"a rollout model of Trinity died: {_first_line(error)}") from error
        except RayError as error:
            raise EngineError(f"Trinity's rollout model failed: {_first_line(error)}") from error
        if on_tokens is not None:
            on_tokens(TokenChunk(completion.token_ids, completion.logprobs))
        return completion

    async def load_weights(self, source: Any, version: int) -> None:
        """Trinity hands weights to its models itself."""
        raise EngineError("the trinity backbone loads weights into its own models")

    async def pause(self) -> None:
        """Trinity's synchronizer does what is needed."""

    async def resume(self) -> None:
        """See `pause`."""

    async def health(self) -> dict[str, Any]:
        return {"engine": "trinity", "version": int(await self._actor.get_model_version.remote())}

    async def aclose(self) -> None:
        """The models are Trinity's; only our connection to them ends."""
        if self._server is not None:
            await self._server.aclose()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
