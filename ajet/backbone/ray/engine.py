"""`RayEngine`: what the engines of both backbones share. Models are served, and kept up to date, by verl or Trinity."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ajet.backbone.ray.watcher import first_line
from ajet.schema.chat import EngineCapabilities
from ajet.schema.errors import EngineError, GenerationTimeoutError

T = TypeVar("T")


class RayEngine:
    """`on_death` is called when a server process is gone."""

    def __init__(self, title: str, *, max_model_len: int, on_death: Callable[[BaseException], None] | None) -> None:
        self._title = title
        self._on_death = on_death
        self.capabilities = EngineCapabilities(title.lower(), load_weights=False, max_model_len=max_model_len)

    async def ready(self) -> None:
        """The servers start before we do."""

    async def answer(self, asked: Awaitable[T], deadline_s: float | None) -> T:
        """Wait for a server's answer. Ray's errors become ours."""
        from ray.exceptions import RayActorError, RayError

        try:
            return await asyncio.wait_for(asked, deadline_s)
        except TimeoutError:
            raise GenerationTimeoutError(f"no reply from {self._title}'s server within {deadline_s:.0f} s") from None
        except RayActorError as error:
            if self._on_death is not None:
                self._on_death(error)
            raise EngineError(f"a rollout server of {self._title} died: {first_line(error)}") from error
        except RayError as error:
            raise EngineError(f"{self._title}'s rollout server failed: {first_line(error)}") from error

    async def load_weights(self, source: Any, version: int) -> None:
        """Weights reach the servers without us."""
        raise EngineError(f"{self._title} loads weights into its own servers")

    async def pause(self) -> None:
        """The servers are paused without us."""

    async def resume(self) -> None:
        """See `pause`."""

    async def aclose(self) -> None:
        """The servers aren't ours to end."""
