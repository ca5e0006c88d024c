"""`OutsideRunner`: attempts that a program elsewhere has begun, and will end. Lives on the service loop.

This is `wrapper_type: outside`. Nothing of the user's is run here but the judge: the program calls the model with the
episode's key, and says when it is over with the control key. What never ends runs into `rollout.episode_timeout`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ajet.schema.episode import EnvironmentRecord
from ajet.schema.task import WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.attempt import EndedEarly, OpenSession, RunningAttempt, SessionProvider
from ajet.task_runner.judging_here import judge_here
from ajet.task_runner.results import WorkflowResult

if TYPE_CHECKING:
    from ajet.gateway.gateway import EpisodeKey


class OutsideRunner:
    """Waits for attempts to be ended."""

    def __init__(self, sessions: SessionProvider, judge: BaseJudge | None) -> None:
        self.sessions = sessions
        self.judge = judge
        self._attempts: dict[str, OutsideAttempt] = {}
        """By episode."""
        self._keys: dict[str, asyncio.Future[EpisodeKey]] = {}

    def key_of(self, episode_id: str) -> asyncio.Future[EpisodeKey]:
        """How the program reaches the model, once the attempt has a session."""
        if episode_id not in self._keys:
            self._keys[episode_id] = asyncio.get_running_loop().create_future()
        return self._keys[episode_id]

    async def ready(self) -> None:
        """Whoever begins an episode is ready."""

    def begin(self, workflow_task: WorkflowTask, open_session: OpenSession, ended_early: EndedEarly) -> RunningAttempt:
        attempt = OutsideAttempt(self, workflow_task, open_session, ended_early)
        self._attempts[workflow_task.episode_uuid] = attempt
        return attempt

    def find(self, episode_id: str) -> OutsideAttempt | None:
        """The attempt of an episode that is not over."""
        return self._attempts.get(episode_id)

    def forget(self, episode_id: str) -> None:
        """The attempt is over."""
        self._attempts.pop(episode_id, None)
        if (key := self._keys.pop(episode_id, None)) is not None:
            key.cancel()

    async def aclose(self) -> None:
        self._attempts.clear()


class OutsideAttempt:
    """One attempt, from the first request to the last."""

    environment: EnvironmentRecord | None = None

    def __init__(
        self, runner: OutsideRunner, workflow_task: WorkflowTask, open_session: OpenSession, ended_early: EndedEarly
    ) -> None:
        self._runner = runner
        self._task = workflow_task
        self._open_session = open_session
        self._ended_early = ended_early
        self._end: asyncio.Future[WorkflowResult] = asyncio.get_running_loop().create_future()

    def end(self, result: WorkflowResult) -> bool:
        """The program says that it is over. False: it was over already."""
        if self._end.done():
            return False
        self._end.set_result(result)
        return True

    async def result(self) -> WorkflowResult:
        session = await self._open_session(None)
        self._runner.key_of(self._task.episode_uuid).set_result(await self._runner.sessions.access(session))
        result = await self._end
        retries = self._runner.sessions.config.ajet.rollout.episode_retries
        await judge_here(result, self._runner.judge, self._task, self._ended_early, retries)
        return result

    async def where(self) -> str:
        return ""

    def release(self) -> None:
        self._runner.forget(self._task.episode_uuid)
