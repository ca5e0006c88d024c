"""`Model`: tokenizer, renderer, reply parser and engine of a config, and the sessions over them.

`load_model` builds one. `ModelLoader` does so in a thread, while the user's workflow is imported.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ajet.config.kinds import ENGINES, load
from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings
from ajet.engine.base import Engine, EnginePlacement
from ajet.engine.model_source import ModelSource
from ajet.gateway.chat import EpisodeSession, ReplyParser, SeedKey, SessionSettings, pick_parser
from ajet.schema.errors import ConfigError, EngineError, UserError
from ajet.schema.install import require_training

if TYPE_CHECKING:
    from ajet.config import Config

MakeEngine = Callable[["Config"], Engine]


@dataclass(frozen=True, slots=True)
class Model:
    """What a session needs of the model. The engine may still be loading its weights."""

    tokenizer: Any
    renderer: Renderer
    parser: ReplyParser
    engine: Engine

    def open_session(
        self, episode_id: str, settings: SessionSettings, limits: TrackerSettings, deadline_s: float | None = None
    ) -> EpisodeSession:
        return EpisodeSession(
            episode_id=episode_id,
            tracker=ContextTracker(self.renderer, limits),
            renderer=self.renderer,
            engine=self.engine,
            parser=self.parser,
            settings=settings,
            deadline_s=deadline_s,
        )

    def open_conversation(self, max_model_len: int) -> EpisodeSession:
        """A session that isn't trained on: clients choose the sampling, and only the model's length is limited."""
        seed = SeedKey(seed=random.SystemRandom().getrandbits(48))
        limits = TrackerSettings(
            call_prefix=f"{seed.seed:x}",  # clients of `ajet serve` see the replies of many conversations
            max_model_len=max_model_len,
            max_prompt_length=max_model_len,
            max_response_length=max_model_len,
            max_response_length_in_one_turn=max_model_len,
            max_steps=2**31,
            checks=(),
            terminate_on_abnormal=False,
            detect_forks=False,
        )
        return self.open_session(f"served-{seed.seed:x}", SessionSettings(training=False, seed_key=seed), limits)


def build_engine(config: Any, placement: EnginePlacement | None = None) -> Engine:
    """The engine that `rollout.engine` names, for the model in `model.path`. Returns at once; weights load later."""
    engine: Engine = load(ENGINES, config.ajet.rollout.engine).from_config(config, placement or EnginePlacement())
    return engine


def load_model(
    config: Config, make_engine: MakeEngine = build_engine, before_engine: Callable[[], object] = lambda: None
) -> Model:
    """Load the tokenizer and start the engine, which loads in the background. Raises a `UserError`."""
    name = config.ajet.model.path
    require_training("a model here")
    try:
        source = ModelSource.resolve(name)
        tokenizer = source.tokenizer()
        renderer = Renderer(
            tokenizer, reasoning_history=config.ajet.rollout.reasoning_history, end_ids=source.end_ids()
        )
        parser = pick_parser(getattr(tokenizer, "chat_template", None))
        before_engine()
        return Model(tokenizer, renderer, parser, make_engine(config))
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"ajet.model.path: {name!r} can't be loaded: {type(error).__name__}: {error}") from error


class ModelLoader:
    """Loads a model in a thread. Episodes can begin once the tokenizer is there, before the engine is ready."""

    def __init__(self, config: Config, make_engine: MakeEngine) -> None:
        self.loaded: Future[Model] = Future()
        self.engine_error: UserError | None = None
        """Why the engine will never be ready."""
        self._config = config
        self._make_engine = make_engine
        self._code_imported = threading.Event()
        self._stopped = False
        self.makes_engine = False
        """`loaded` ends with an engine, which must be closed, or soon with an error."""

    def start(self) -> None:
        threading.Thread(target=self._load, name="ajet-load", daemon=True).start()

    def user_code_imported(self) -> None:
        """Let the engine load. Its libraries wait for the user's code: imports share one interpreter lock, and someone
        who debugs is waiting for the workflow's first line."""
        self._code_imported.set()

    def stop(self) -> None:
        """Make no engine any more. One that is being made is there once `loaded` is done."""
        self._stopped = True
        self._code_imported.set()

    async def watch_engine(self) -> None:
        """Wait for the engine, and note why it can't load: that ends the run, instead of failing every episode."""
        try:
            await self.loaded.result().engine.ready()
        except UserError as error:
            self.engine_error = error
        except Exception as error:  # noqa: BLE001 - whatever an engine's library raises
            self.engine_error = self.refusal(error)

    def refusal(self, error: Exception) -> UserError:
        """Why the run can't begin, if this is what the engine raised while it loaded."""
        ajet = self._config.ajet
        name = "" if isinstance(error, EngineError) else f"{type(error).__name__}: "
        if ajet.rollout.engine in ("remote", "sglang"):  # the server's model, which may have another name
            return ConfigError(f"ajet.rollout.engine: {ajet.rollout.engine} can't be used: {name}{error}")
        return ConfigError(
            f"ajet.rollout.engine: {ajet.rollout.engine} could not load {ajet.model.path!r}: {name}{error}"
        )

    def _load(self) -> None:
        try:
            model = load_model(self._config, self._make_engine, self._wait_for_code)
        except UserError as error:
            self.loaded.set_exception(error)
        else:
            self.loaded.set_result(model)

    def _wait_for_code(self) -> None:
        self._code_imported.wait()
        self.makes_engine = True  # before the look at `_stopped`: whoever stops sees it, or is seen here
        if self._stopped:
            raise ConfigError("the run was stopped before it had an engine")
