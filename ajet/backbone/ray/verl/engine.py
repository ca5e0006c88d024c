"""`ServerEngine`: verl's rollout servers as our `Engine`. Token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Any

from ajet.backbone.ray.engine import RayEngine
from ajet.engine.base import OnTokens
from ajet.schema.chat import Completion, GenerateRequest, Sampling, TokenChunk
from ajet.schema.errors import EngineError

VERSIONS = "ajet_versions"
"""In the `extra_fields` of what a server or its client returns: [(index of first token, version), …]."""


class ServerKind(StrEnum):
    """What serves, which decides how stop strings and seeds are passed. Token ids that end a reply reach all of them.

    Where a server doesn't know stop strings, it goes on to an end token; what it drew behind the stop string is left
    off here, and the reply is distributed as if it had stopped there.
    """

    EMBEDDED = "embedded"
    """Our own engine: stop strings and seed."""
    VLLM = "vllm"
    """Stop strings and seed."""
    SGLANG = "sglang"
    """verl starts it without a tokenizer: no stop strings. Its seed has a name of its own, and acts only where SGLang
    computes deterministically."""
    OTHER = "other"
    """Neither."""


class ServerEngine(RayEngine):
    """Asks the servers that verl started and updates with its weights.

    `end_ids`: the ids that end a reply. `decode`: the text of token ids, in which stop strings are looked for.
    """

    def __init__(
        self,
        client: Any,
        *,
        end_ids: Collection[int],
        max_model_len: int,
        kind: ServerKind,
        decode: Callable[[list[int]], str],
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__("verl", max_model_len=max_model_len, on_death=on_death)
        self._client = client
        self._end_ids = frozenset(end_ids)
        self._kind = kind
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
        if self._kind in (ServerKind.EMBEDDED, ServerKind.VLLM):
            parameters |= {"seed": sampling.seed, "stop": list(sampling.stop)}
        elif self._kind is ServerKind.SGLANG and sampling.seed is not None:
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
