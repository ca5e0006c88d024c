"""`WorkflowAttempt`: one try at an episode. And what running one takes: a `SessionProvider` and an `AttemptRunner`.

All of it is used on the service loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ajet.schema.task import WorkflowTask

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.gateway.chat import EpisodeSession
    from ajet.gateway.gateway import EpisodeKey
    from ajet.schema.episode import EnvironmentRecord
    from ajet.task_runner.results import EarlyEnding
    from ajet.task_runner.tuner import AjetTuner
    from ajet.task_runner.workflow_result import WorkflowResult

OpenSession = Callable[[list[str] | None], Awaitable["EpisodeSession"]]
"""Opens the attempt's session, given the workflow's `trainable_targets`."""

EndedEarly = Callable[[bool], "EarlyEnding | None"]
"""How the attempt ended, once its workflow has raised: see `ajet.task_runner.results.AskEnding`."""


@dataclass(frozen=True, slots=True)
class WorkflowAttempt:
    """One try at an episode."""

    workflow_task: WorkflowTask
    episode_id: str
    """Unique to the attempt: a key of an earlier attempt must not open a later one."""
    group_id: str = ""
    step: int = 0
    """The training step. Together with the seed, it decides which tokens are sampled."""
    occurrence: int = 0
    """The index of its group among its task's groups in the step."""
    validation: bool = False
    trainable_targets: tuple[str, ...] = ()
    deadline_s: float | None = None


class SessionProvider(Protocol):
    """Opens sessions, and gives workflows access to them."""

    config: Config
    loop: asyncio.AbstractEventLoop

    async def open_session(self, attempt: WorkflowAttempt) -> EpisodeSession:
        """A session with a fresh tracker. Waits for the tokenizer; raises a `UserError` if it can't be loaded."""
        ...

    def tuner(self, session: EpisodeSession) -> AjetTuner:
        """The tuner of a workflow in this process."""
        ...

    async def access(self, session: EpisodeSession) -> EpisodeKey:
        """How a workflow in another process reaches the session. Starts the gateway if necessary."""
        ...


class RunningAttempt(Protocol):
    """The workflow and judge of one attempt, running."""

    async def result(self) -> WorkflowResult:
        """Wait for workflow and judge. Cancelling the wait leaves the code running: `release` ends it."""
        ...

    @property
    def environment(self) -> EnvironmentRecord | None:
        """What its environment was asked so far; None without an environment."""
        ...

    async def where(self) -> str:
        """The stack of the user's code, to report when the deadline passes."""
        ...

    def release(self) -> None:
        """End whatever still runs of the attempt. Returns at once."""
        ...


class AttemptRunner(Protocol):
    """Runs the user's code of attempts: in threads, or in processes."""

    async def ready(self) -> None:
        """Wait until attempts can begin. Doesn't count as an episode's time. Raises a `UserError`."""
        ...

    def begin(
        self, workflow_task: WorkflowTask, open_session: OpenSession, ended_early: EndedEarly
    ) -> RunningAttempt: ...

    async def aclose(self) -> None: ...
