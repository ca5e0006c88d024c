"""The `Engine` protocol, where tokens come from, and `build_engine`, which makes the one a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ajet.config.kinds import ENGINES, load
from ajet.schema.generation import Completion, EngineCapabilities, GenerateRequest, TokenChunk

OnTokens = Callable[[TokenChunk], None]


@runtime_checkable
class Engine(Protocol):
    """Generates replies: token ids in, token ids and logprobs out.

    Cancelling the awaiting task cancels the generation. Failures are `ajet.schema.errors.EngineError`s.
    """

    @property
    def capabilities(self) -> EngineCapabilities: ...

    async def ready(self) -> None:
        """Return when the engine can generate; raise whatever went wrong while loading.

        This may take long: weights load in the background while the workflow starts. `generate` waits for it by itself.
        """

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Generate one reply. `on_tokens` is called on the awaiting event loop."""
        ...

    async def load_weights(self, source: Any, version: int) -> None:
        """Serve these weights from now on, as this policy version. Prefixes cached earlier are never used again.

        An engine with weights of its own that dies meanwhile, or later, comes back with them. One that sleeps wakes
        first."""

    async def pause(self) -> None:
        """Start no new requests, and wait until none is in flight. An engine that can sleep then does."""

    async def resume(self) -> None: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Where an engine computes and what it must hold, as the trainer beside it decides."""

    device: str | None = None
    """Of the embedded engine. None: a GPU if there is one."""
    gpus: tuple[int, ...] = ()
    """Of vLLM's servers, instead of `rollout.vllm.devices`."""
    adapter_rank: int = 0
    """Of the LoRA adapters that vLLM will be given."""
    base_bits: int | None = None
    """Of the embedded engine's linear layers."""


def build_engine(config: Any, placement: EnginePlacement | None = None) -> Engine:
    """The engine that `rollout.engine` names, for the model in `model.path`. Returns at once; weights load later."""
    engine: Engine = load(ENGINES, config.ajet.rollout.engine).from_config(config, placement or EnginePlacement())
    return engine
