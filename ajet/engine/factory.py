"""From a loaded configuration to an engine. Returns at once: weights load in the background."""

from __future__ import annotations

from typing import Any

from ajet.engine.base import Engine
from ajet.engine.model_source import ModelSource
from ajet.schema.errors import ConfigError

ENGINES = ("torch", "vllm", "sglang", "remote", "scripted")


def build_engine(config: Any) -> Engine:
    """Build the engine that `rollout.engine` names, for the model in `model.path`."""
    name = config.ajet.rollout.engine
    if name == "torch":
        from ajet.engine.torch.engine import TorchEngine
        from ajet.engine.torch.settings import TorchEngineSettings

        return TorchEngine(config.ajet.model.path, TorchEngineSettings.from_config(config))
    if name == "vllm":
        return _vllm(config)
    if name == "sglang":
        from ajet.engine.remote.settings import RemoteSettings
        from ajet.engine.sglang.engine import SglangEngine

        return SglangEngine(RemoteSettings.from_config(config))
    if name == "remote":
        from ajet.engine.remote.engine import RemoteEngine
        from ajet.engine.remote.settings import RemoteSettings

        return RemoteEngine(RemoteSettings.from_config(config))
    if name == "scripted":
        return _scripted(config)
    raise ConfigError(f"rollout.engine {name!r} does not exist: one of {', '.join(ENGINES)}")


def _vllm(config: Any) -> Engine:
    from ajet.engine.vllm.settings import VllmSettings

    settings = VllmSettings.from_config(config)
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
