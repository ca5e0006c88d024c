"""The engines of both backbones: models are served, and kept up to date, by verl (`ServerEngine`) or Trinity
(`TrinityEngine`). Token ids in, token ids and logprobs out. Neither library is loaded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ajet.backbone.ray.verl.config import CPU_ROLLOUT, VERSIONS
from ajet.backbone.ray.watcher import first_line
from ajet.context_tracker import Renderer
from ajet.engine.base import OnTokens
from ajet.engine.model_source import ModelSource
from ajet.engine.remote import RemoteEngine
from ajet.engine.remote_client import Endpoint, RemoteSettings
from ajet.schema.chat import Completion, EngineCapabilities, GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import EngineError, GenerationTimeoutError

if TYPE_CHECKING:
    from ajet.config import Config

T = TypeVar("T")


class RayEngine:
    """What both share. `on_death` is called when a server process is gone."""

    def __init__(self, title: str, *, max_model_len: int, on_death: Callable[[BaseException], None] | None) -> None:
        self._title = title
        self._on_death = on_death
        self.capabilities = EngineCapabilities(title.lower(), load_weights=False, max_model_len=max_model_len)

    async def ready(self) -> None:
        """The servers start before we do."""

    async def answer(self, asked: Awaitable[T], deadline_s: float | None) -> T:
        """Wait for a server's answer. Ray's errors become ours."""
        from ray.exceptions import RayActorError, RayError

        try:
            return await asyncio.wait_for(asked, deadline_s)
        except TimeoutError:
            raise GenerationTimeoutError(f"no reply from {self._title}'s server within {deadline_s:.0f} s") from None
        except RayActorError as error:
            if self._on_death is not None:
                self._on_death(error)
            raise EngineError(f"a rollout server of {self._title} died: {first_line(error)}") from error
        except RayError as error:
            raise EngineError(f"{self._title}'s rollout server failed: {first_line(error)}") from error

    async def load_weights(self, source: Any, version: int) -> None:
        """Weights reach the servers without us."""
        raise EngineError(f"{self._title} loads weights into its own servers")

    async def pause(self) -> None:
        """The servers are paused without us."""

    async def resume(self) -> None:
        """See `pause`."""

    async def aclose(self) -> None:
        """The servers aren't ours to end."""


class ServerEngine(RayEngine):
    """Asks the servers that verl started and updates with its weights.

    `end_ids`: the ids that end a reply. `decode`: the text of token ids, in which stop strings are looked for.
    `servers`: verl's name of what serves. Only the embedded engine and vLLM are given stop strings and seeds: verl
    starts SGLang without a tokenizer, and SGLang's seed has a name of its own, and acts only where it computes
    deterministically. A server that doesn't know stop strings goes on to an end token, whose ids reach all of them;
    what it drew behind the stop string is left off here, and the reply is distributed as if it had stopped there.
    """

    def __init__(
        self,
        client: Any,
        *,
        end_ids: Collection[int],
        max_model_len: int,
        servers: str,
        decode: Callable[[list[int]], str],
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__("verl", max_model_len=max_model_len, on_death=on_death)
        self._client = client
        self._end_ids = frozenset(end_ids)
        self._servers = servers
        self._decode = decode

    @classmethod
    def of(
        cls, config: Config, client: Any, servers: str, on_death: Callable[[BaseException], None] | None = None
    ) -> ServerEngine:
        """Make one for the model of a run. `client`: verl's. `servers`: its name of what serves the model."""
        from ajet.backbone.ray.verl.client import with_versions

        source = ModelSource.resolve(config.ajet.model.path)
        renderer = Renderer(source.tokenizer(), end_ids=source.end_ids())
        return cls(
            with_versions(client),
            end_ids=renderer.end_ids,
            max_model_len=config.ajet.rollout.max_model_len,
            servers=servers,
            decode=renderer.decode,
            on_death=on_death,
        )

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Draw one reply. Servers don't stream: `on_tokens` gets it whole."""
        asked = self._client.generate(
            request.session_id, prompt_ids=list(request.prompt_ids), sampling_params=self._parameters(request.sampling)
        )
        completion = self._completion(await self.answer(asked, request.deadline_s), request.sampling)
        if on_tokens is not None:
            on_tokens(TokenChunk(completion.token_ids, completion.logprobs))
        return completion

    def _parameters(self, sampling: Sampling) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "ignore_eos": sampling.ignore_eos,
            "logprobs": True,
            "stop_token_ids": sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._end_ids)}),
        }
        if sampling.max_tokens is not None:
            parameters["max_tokens"] = sampling.max_tokens
        if self._servers in (CPU_ROLLOUT, "vllm"):
            parameters |= {"seed": sampling.seed, "stop": list(sampling.stop)}
        elif self._servers == "sglang" and sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed
        return parameters

    def _completion(self, output: Any, sampling: Sampling) -> Completion:
        ids = [int(token) for token in output.token_ids]
        logprobs = [float(value) for value in output.log_probs or ()]
        if len(ids) != len(logprobs):
            raise EngineError(f"verl's server returned {len(ids)} tokens with {len(logprobs)} logprobs")
        stopped_by, count = self._stop_string(ids, sampling)
        versions = [(first, version) for first, version in _versions(output.extra_fields) if first < max(count, 1)]
        completion = Completion(ids[:count], logprobs[:count], "stop", stopped_by, versions=versions)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._end_ids)}
        if stopped_by is not None:
            return completion
        if output.stop_reason in ("aborted", "abort"):
            completion.finish_reason = "abort"
        elif ids and ids[-1] in ends:
            completion.stopped_by = ids[-1]
        else:
            completion.finish_reason = "length"
        return completion

    def _stop_string(self, ids: list[int], sampling: Sampling) -> tuple[str | None, int]:
        """The stop string that appears first, and how many tokens there are up to the one that completes it."""
        if not any(stop in self._decode(ids) for stop in sampling.stop):
            return None, len(ids)
        low, high = 1, len(ids)  # the shortest prefix whose text holds one of them
        while low < high:
            middle = (low + high) // 2
            if any(stop in self._decode(ids[:middle]) for stop in sampling.stop):
                high = middle
            else:
                low = middle + 1
        text = self._decode(ids[:high])
        return min((text.find(stop), stop) for stop in sampling.stop if stop in text)[1], high


def _versions(fields: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Which weights sampled it, from which token on. Where only the oldest and the newest are known: the oldest."""
    if fields.get(VERSIONS):
        return [(int(first), int(version)) for first, version in fields[VERSIONS]]
    oldest = fields.get("min_global_steps")
    return [(0, int(fields.get("global_steps") or 0) if oldest is None else int(oldest))]


class TrinityEngine(RayEngine):
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
