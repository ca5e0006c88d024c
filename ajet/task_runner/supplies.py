"""What an episode needs from the process that runs it: a session, and the way in to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ajet.schema.task import WorkflowTask

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.session import EpisodeSession
    from ajet.tuner import AjetTuner


@dataclass(frozen=True, slots=True)
class EpisodeOrder:
    """One attempt at an episode."""

    workflow_task: WorkflowTask
    episode_id: str
    """Unique for each attempt: a key of an earlier attempt must not open a later one."""
    group_id: str = ""
    step: int = 0
    """The conductor's step; with the seed it decides what is drawn."""
    validation: bool = False
    trainable_targets: tuple[str, ...] = ()
    deadline_s: float | None = None


class Access(NamedTuple):
    """How another process reaches an episode's session."""

    base_url: str
    api_key: str


class Supplies(Protocol):
    """Sessions for episodes. Used on the service loop only."""

    config: Config
    loop: asyncio.AbstractEventLoop

    async def open_session(self, order: EpisodeOrder) -> EpisodeSession:
        """A session with a fresh tracker. Waits for the tokenizer; raises a `UserError` if there will never be one."""
        ...

    def tuner(self, session: EpisodeSession) -> AjetTuner:
        """What a workflow in this process gets."""
        ...

    async def access(self, session: EpisodeSession) -> Access:
        """What a workflow in another process needs; starts the gateway if it does not run yet."""
        ...
