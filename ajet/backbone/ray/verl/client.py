"""verl's client of its rollout servers, which also says which weights sampled which token of a reply.

verl's asynchronous trainers stop replies in the middle, bring new weights to the servers, and go on; the caller gets
one reply. Of the versions that sampled it, verl's own client keeps the oldest and the newest, not where they changed.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ajet.backbone.ray.verl.config import VERSIONS

_pieces: ContextVar[list[tuple[int, Any]]] = ContextVar("_pieces")


class _Pieces(LLMServerClient):  # type: ignore[misc]
    """Stands below verl's client that goes on with stopped replies, and so sees each piece of them."""

    async def generate(self, request_id: str, **asked: Any) -> Any:
        pieces = _pieces.get()
        sampled = sum(count for count, _ in pieces)
        seed = asked["sampling_params"].get("seed")
        if sampled and seed is not None:  # or the random numbers of its beginning would come again
            asked["sampling_params"] = {**asked["sampling_params"], "seed": seed ^ sampled}
        output = await super().generate(request_id, **asked)
        own = output.extra_fields.get(VERSIONS) or [(0, output.extra_fields.get("global_steps"))]
        ends = [*(first for first, _ in own[1:]), len(output.token_ids)]
        pieces += [(end - first, version) for (first, version), end in zip(own, ends, strict=True)]
        return output


class VersionsClient(FullyAsyncLLMServerClient, _Pieces):  # type: ignore[misc]
    """A stopped reply goes on as with verl's client."""

    async def generate(self, request_id: str, **asked: Any) -> Any:
        pieces: list[tuple[int, Any]] = []
        _pieces.set(pieces)
        output = await super().generate(request_id, **asked)
        versions: list[tuple[int, int]] = []
        first = 0
        for count, version in pieces:
            if count and version is not None and (not versions or versions[-1][1] != version):
                versions.append((first, int(version)))
            first += count
        output.extra_fields[VERSIONS] = versions
        return output


def with_versions(client: Any) -> Any:
    """The client that verl's trainer chose; where it stops replies, one that notes their versions."""
    if type(client) is not FullyAsyncLLMServerClient:
        return client
    noting = copy.copy(client)
    noting.__class__ = VersionsClient
    return noting
