"""What episodes need in a worker process: the same `Runtime` as with every backbone, on verl's servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ajet.backbone.ray.verl.engine import ServerEngine
from ajet.context_tracker import Renderer
from ajet.engine.model_source import ModelSource
from ajet.runtime.runtime import Runtime

if TYPE_CHECKING:
    from ajet.config import Config


def open_services(
    config: Config, client: Any, *, parallel: int, embedded: bool, on_death: Callable[[BaseException], None]
) -> Runtime:
    """Start them; called once a process, outside of any event loop. `client` is verl's way to its servers."""

    def make_engine(loaded: Config) -> ServerEngine:
        renderer = Renderer(ModelSource.resolve(loaded.ajet.model.path).tokenizer())
        return ServerEngine(
            client,
            end_ids=renderer.end_ids,
            max_model_len=loaded.ajet.rollout.max_model_len,
            embedded=embedded,
            decode=renderer.decode,
            on_death=on_death,
        )

    return Runtime(config, make_engine=make_engine, parallel=parallel).start()
