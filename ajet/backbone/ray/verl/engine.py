"""`ServerEngine`: verl's rollout servers as our `Engine`. Token ids in, token ids and logprobs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from ajet.engine.base import OnTokens
from ajet.schema.errors import EngineError, GenerationTimeoutError
from ajet.schema.generation import Completion, EngineCapabilities, GenerateRequest, Sampling, TokenChunk


class ServerEngine:
    """Asks the servers that verl started and keeps up to date with its weights.

    `end_ids`: the ids that end a reply. `embedded`: the servers are our own engine, which knows stop strings and
    draws from a seed; verl's vLLM and SGLang servers have no tokenizer, so there a reply goes on to its end token and
    the text alone is cut, and a seed for each request would slow all of them. `on_death` is told when a server process
    is gone.
    """

    def __init__(
        self,
        client: Any,
        *,
        end_ids: Collection[int],
        max_model_len: int,
        embedded: bool = False,
        decode: Callable[[list[int]], str] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._client = client
        self._end_ids = frozenset(end_ids)
        self._embedded = embedded
        self._decode = decode
        self._on_death = on_death
        self.capabilities = EngineCapabilities("verl", load_weights=False, max_model_len=max_model_len)
        self.version = 0
        """Newest policy version seen in a reply."""

    async def ready(self) -> None:
        """verl starts its servers before it starts us."""

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Draw one reply. Servers don't stream: `on_tokens` gets it whole."""
        from ray.exceptions import RayActorError, RayError

        try:
            output = await asyncio.wait_for(
                self._client.generate(
                    request.session_id,
                    prompt_ids=list(request.prompt_ids),
                    sampling_params=self._parameters(request.sampling),
                ),
                request.deadline_s,
            )
        except TimeoutError:
            raise GenerationTimeoutError(f"no reply from verl's server within {request.deadline_s:.0f} s") from None
        except RayActorError as error:
            if self._on_death is not None:
                self._on_death(error)
            raise EngineError(f"a rollout server of verl died: {_first_line(error)}") from error
        except RayError as error:
            raise EngineError(f"verl's rollout server failed: {_first_line(error)}") from error
        completion = self._completion(output, request.sampling)
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
        if self._embedded:
            parameters |= {"seed": sampling.seed, "stop": list(sampling.stop)}
        return parameters

    def _completion(self, output: Any, sampling: Sampling) -> Completion:
        ids = [int(token) for token in output.token_ids]
        logprobs = [float(value) for value in output.log_probs or ()]
        if len(ids) != len(logprobs):
            raise EngineError(f"verl's server returned {len(ids)} tokens with {len(logprobs)} logprobs")
        self.version = int(output.extra_fields.get("global_steps") or 0)
        oldest = output.extra_fields.get("min_global_steps")
        versions = [(0, self.version if oldest is None else int(oldest))]
        completion = Completion(ids, logprobs, "stop", versions=versions)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._end_ids)}
        text_stop = self._stop_string(ids, sampling)
        if output.stop_reason in ("aborted", "abort"):
            completion.finish_reason = "abort"
        elif ids and ids[-1] in ends:
            completion.stopped_by = ids[-1]
        elif text_stop is not None:
            completion.stopped_by = text_stop
        else:
            completion.finish_reason = "length"
        return completion

    def _stop_string(self, ids: list[int], sampling: Sampling) -> str | None:
        if not sampling.stop or self._decode is None:
            return None
        text = self._decode(ids)
        found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        return min(found)[1] if found else None

    async def load_weights(self, source: Any, version: int) -> None:
        """verl hands weights to its servers itself."""
        raise EngineError("the verl backbone loads weights into its own servers")

    async def pause(self) -> None:
        """verl pauses its servers itself."""

    async def resume(self) -> None:
        """verl resumes its servers itself."""

    async def health(self) -> dict[str, Any]:
        return {"engine": "verl", "version": self.version}

    async def aclose(self) -> None:
        """The servers are verl's."""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
