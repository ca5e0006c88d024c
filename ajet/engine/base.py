"""The `Engine` protocol: where tokens come from. Token ids in, token ids and logprobs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ajet.schema.generation import Completion, EngineCapabilities, GenerateRequest, TokenChunk

OnTokens = Callable[[TokenChunk], None]


@runtime_checkable
class Engine(Protocol):
    """Draws replies. Cancelling the awaiting task cancels the generation.

    Failures are `ajet.schema.errors.EngineError`s. `ready()` may take long (weights load in the background while the
    workflow starts); `generate` waits for it by itself.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    async def ready(self) -> None:
        """Return when the first reply can be drawn; raise what went wrong while loading."""

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Draw one reply. `on_tokens` is called on the awaiting event loop."""
        ...

    async def load_weights(self, source: Any, version: int) -> None:
        """Serve these weights from now on, under this policy version; prefixes cached before are never used again."""

    async def pause(self) -> None:
        """Take no new work and wait until nothing is in flight."""

    async def resume(self) -> None: ...

    async def health(self) -> dict[str, Any]:
        """Facts for logs: load, cache use, version. Raises EngineError if the engine is dead."""
        ...

    async def aclose(self) -> None: ...
