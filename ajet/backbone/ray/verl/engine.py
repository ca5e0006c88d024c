"""`ServerEngine`: verl's rollout servers as our `Engine`. Token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ajet.backbone.ray.engine import RayEngine
from ajet.engine.base import OnTokens
from ajet.schema.errors import EngineError
from ajet.schema.generation import Completion, GenerateRequest, Sampling, TokenChunk


class ServerEngine(RayEngine):
    """Asks the servers that verl started and updates with its weights.

    `end_ids`: the ids that end a reply. `embedded`: the servers are our own engine, which knows stop strings and
    draws from a seed. verl's vLLM and SGLang servers have no tokenizer: a reply goes on to its end token and only
    the text is cut, and a seed per request would slow all requests down.
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
        super().__init__("verl", max_model_len=max_model_len, on_death=on_death)
        self._client = client
        self._end_ids = frozenset(end_ids)
        self._embedded = embedded
        self._decode = decode

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
        if self._embedded:
            parameters |= {"seed": sampling.seed, "stop": list(sampling.stop)}
        return parameters

    def _completion(self, output: Any, sampling: Sampling) -> Completion:
        ids = [int(token) for token in output.token_ids]
        logprobs = [float(value) for value in output.log_probs or ()]
        if len(ids) != len(logprobs):
            raise EngineError(f"verl's server returned {len(ids)} tokens with {len(logprobs)} logprobs")
        oldest = output.extra_fields.get("min_global_steps")
        version = int(output.extra_fields.get("global_steps") or 0) if oldest is None else int(oldest)
        completion = Completion(ids, logprobs, "stop", versions=[(0, version)])
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
