"""The `Engine` protocol, where tokens come from, and `build_engine`, which makes the one a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from ajet.engine.model_source import ModelSource
from ajet.schema.errors import ConfigError
from ajet.schema.generation import Completion, EngineCapabilities, GenerateRequest, TokenChunk

OnTokens = Callable[[TokenChunk], None]

ENGINES = ("torch", "vllm", "sglang", "remote", "scripted")


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


def build_engine(
    config: Any,
    *,
    device: str | None = None,
    gpus: Sequence[int] = (),
    adapter_rank: int = 0,
    base_bits: int | None = None,
) -> Engine:
    """The engine that `rollout.engine` names, for the model in `model.path`. Returns at once; weights load later.

    `device`: where the embedded engine computes; `gpus`: where vLLM's servers do, instead of `rollout.vllm.devices`;
    `adapter_rank`: of the LoRA adapters that vLLM will be given; `base_bits`: of the embedded engine's linear layers.
    """
    name = config.ajet.rollout.engine
    if name == "torch":
        from ajet.engine.torch.engine import TorchEngine, TorchEngineSettings

        settings = replace(TorchEngineSettings.from_config(config), device=device, base_bits=base_bits)
        return TorchEngine(config.ajet.model.path, settings)
    if name == "vllm":
        return _vllm(config, tuple(gpus), adapter_rank)
    if name == "sglang":
        from ajet.engine.remote_client import RemoteSettings
        from ajet.engine.sglang import SglangEngine

        return SglangEngine(RemoteSettings.from_config(config))
    if name == "remote":
        from ajet.engine.remote import RemoteEngine
        from ajet.engine.remote_client import RemoteSettings

        return RemoteEngine(RemoteSettings.from_config(config))
    if name == "scripted":
        return _scripted(config)
    raise ConfigError(f"rollout.engine {name!r} does not exist: one of {', '.join(ENGINES)}")


def _vllm(config: Any, gpus: tuple[int, ...], adapter_rank: int) -> Engine:
    from ajet.engine.vllm.server import VllmSettings

    settings = VllmSettings.from_config(config)
    settings = replace(settings, devices=gpus or settings.devices, lora_rank=adapter_rank)
    if config.ajet.rollout.vllm.mode == "in_process":
        from ajet.engine.vllm.in_process import VllmInProcessEngine

        return VllmInProcessEngine(settings)
    from ajet.engine.vllm.server_engine import VllmServerEngine

    return VllmServerEngine(settings)


def _scripted(config: Any) -> Engine:
    from ajet.engine.scripted import ScriptedEngine, read_replies

    path = config.ajet.rollout.scripted_replies
    if not path:
        raise ConfigError("rollout.engine: scripted needs rollout.scripted_replies, a YAML or JSON list of replies")
    source = config.ajet.model.path
    return ScriptedEngine(
        read_replies(path),
        lambda: ModelSource.resolve(source).tokenizer(),
        max_model_len=config.ajet.rollout.max_model_len,
    )
