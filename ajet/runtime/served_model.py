"""A model to talk to, by itself: what `ajet chat` and `ajet serve` share.

`TARGET` is a YAML file, an experiment or checkpoint folder (its `hf/` weights), a model folder, a hub id, or
`tiny:<name>`. Everything here lives on one event loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    from ajet.context_tracker import Renderer
    from ajet.engine.base import Engine
    from ajet.session import EpisodeSession
    from ajet.session.reply_parser import ReplyParser

DEFAULT_LENGTH = 8192
"""Tokens of a conversation where no config says otherwise."""
YAML = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine and all that a conversation with it needs."""

    name: str
    engine: Engine
    renderer: Renderer
    parser: ReplyParser
    max_model_len: int
    temperature: float

    def new_session(self) -> EpisodeSession:
        """One conversation that nobody trains on: no limits but the model's length, and the client's own sampling."""
        from ajet.context_tracker import ContextTracker, TrackerSettings
        from ajet.session import EpisodeSession, SessionSettings
        from ajet.session.settings import SeedKey

        length = self.max_model_len
        limits = TrackerSettings(
            max_model_len=length,
            max_prompt_length=length,
            max_response_length=length,
            max_response_length_in_one_turn=length,
            max_steps=2**31,
            checks=(),
            terminate_on_abnormal=False,
            detect_forks=False,
        )
        seed = SeedKey(seed=random.SystemRandom().getrandbits(48))
        return EpisodeSession(
            episode_id=f"served-{seed.seed:x}",
            tracker=ContextTracker(self.renderer, limits),
            renderer=self.renderer,
            engine=self.engine,
            parser=self.parser,
            settings=SessionSettings(training=False, seed_key=seed),
        )


def load_served_model(target: str, overrides: Sequence[str] = ()) -> ServedModel:
    """Find the model, load its tokenizer, and start its engine. Call it where the event loop runs."""
    from ajet.context_tracker import Renderer
    from ajet.engine.model_source import ModelSource
    from ajet.session.tool_call_parsers import pick_parser

    if target.endswith(YAML):
        engine, model, length, temperature = _by_config(target, overrides)
    else:
        if overrides:
            raise ConfigError(f"overrides ({overrides[0]} …) go with a YAML file, and {target} is none")
        model, length, temperature = weights_of(target), DEFAULT_LENGTH, 1.0
        engine = _embedded(model, length)
    tokenizer = ModelSource.resolve(model).tokenizer()
    parser = pick_parser(getattr(tokenizer, "chat_template", None))
    return ServedModel(target, engine, Renderer(tokenizer), parser, length, temperature)


def weights_of(target: str) -> str:
    """The model that a name means: a run's or a checkpoint's `hf/` folder, or what the name says."""
    folder = Path(target).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return target
    if (folder / "hf" / "config.json").is_file():
        return str((folder / "hf").resolve())
    raise ConfigError(f"{target} holds no weights: neither hf/config.json (has a step been saved yet?) nor config.json")


def _by_config(path: str, overrides: Sequence[str]) -> tuple[Engine, str, int, float]:
    from ajet.config import load_config
    from ajet.engine.base import build_engine

    # nothing is trained: no workflow is needed, and an engine that only talks will do
    config: Any = load_config(path, overrides, backbone="debug", complete=False)
    rollout = config.ajet.rollout
    return build_engine(config), config.ajet.model.path, rollout.max_model_len, rollout.temperature


def _embedded(model: str, length: int) -> Engine:
    from ajet.engine.torch.engine import TorchEngine, TorchEngineSettings

    return TorchEngine(model, replace(TorchEngineSettings(), max_model_len=length))
