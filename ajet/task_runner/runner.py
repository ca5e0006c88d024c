"""`TaskRunner.run`: one episode, start to end. A failed episode comes back as data; the runner raises only when the run
itself can't go on (`UserError`, `LostThreadsError`), or when it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ajet.context_tracker import FinishedCalls
from ajet.schema.call_tree import CallTree
from ajet.schema.episode import Episode, EpisodeStatus, Failure, Ledger
from ajet.schema.errors import RewardError, SessionClosedError, UserError
from ajet.schema.task import WorkflowTask
from ajet.task_runner.breakpoints import debugging
from ajet.task_runner.settle import End, Facts, Settlement, settle
from ajet.task_runner.supplies import EpisodeOrder, Supplies
from ajet.task_runner.venue import Performance, Venue
from ajet.task_runner.verdict import Verdict

if TYPE_CHECKING:
    from ajet.session import EpisodeSession

NO_REWARD = (
    "the workflow returned reward=None and there is no judge: return WorkflowOutput(reward=…), "
    "or set ajet.task_judge.judge_protocol"
)

log = logging.getLogger(__name__)


class TaskRunner:
    """Runs episodes of one workflow. Lives on the service loop."""

    def __init__(self, supplies: Supplies, venue: Venue) -> None:
        self.supplies = supplies
        self.venue = venue
        config = supplies.config.ajet
        self._rules = config.failure_reward
        self._retries = config.rollout.episode_retries
        self._timeout_s = config.rollout.episode_timeout
        if config.task_runner.wrapper_type == "multi-processing":
            self._timeout_s = min(self._timeout_s, config.task_runner.wrapper_multiprocessing_timeout)

    async def run(
        self,
        workflow_task: WorkflowTask,
        *,
        validation: bool = False,
        group_id: str = "",
        step: int = 0,
        stop: asyncio.Event | None = None,
    ) -> Episode:
        """Run the episode; again after a fault of the engine, `rollout.episode_retries` times.

        Each attempt has the whole of `rollout.episode_timeout`. Setting `stop` ends it as `cancelled`.
        """
        base_id = workflow_task.episode_uuid or uuid.uuid4().hex
        for attempt in range(1, self._retries + 2):
            episode_id = base_id if attempt == 1 else f"{base_id}.{attempt}"
            await self.venue.ready()
            order = EpisodeOrder(
                workflow_task.model_copy(update={"episode_uuid": episode_id}), episode_id, group_id, step, validation
            )
            episode, settlement = await _Attempt(self, order, stop).run(self._rules)
            episode.attempts = attempt
            if not settlement.retry or attempt > self._retries or (stop is not None and stop.is_set()):
                break
            log.warning("episode %s: %s; running it again", episode_id, _in_short(settlement.failure))
        return episode

    @property
    def timeout_s(self) -> float | None:
        """The deadline of an attempt; None while someone debugs."""
        return None if debugging() else self._timeout_s


class _Attempt:
    """One attempt at one episode."""

    def __init__(self, runner: TaskRunner, order: EpisodeOrder, stop: asyncio.Event | None) -> None:
        self._runner = runner
        self._order = order
        self._stop = stop
        self._session: EpisodeSession | None = None
        self._over = False
        self._broken: UserError | None = None
        """The session could not be opened, and never will be."""
        self._timeout_s = runner.timeout_s
        self._started = time.monotonic()

    async def run(self, rules: Any) -> tuple[Episode, Settlement]:
        if self._stop is not None and self._stop.is_set():
            settlement = settle(Facts(End.STOPPED), rules)
            return self._episode(settlement, None), settlement
        performance = self._runner.venue.begin(self._order.workflow_task, self._open_session)
        try:
            facts = await self._wait(performance)
        finally:
            self._over = True
            if self._session is not None:
                self._session.revoke(self._closed_because())
            performance.release()
        if self._broken is not None:
            raise self._broken
        if self._session is not None:
            facts.outcomes = frozenset(self._session.tracker.outcomes)
            facts.engine_failure = self._session.engine_failure
        settlement = settle(facts, rules)
        return self._episode(settlement, facts.verdict), settlement

    async def _open_session(self, targets: list[str] | None) -> EpisodeSession:
        """Called once, when the workflow object exists."""
        order = replace(self._order, trainable_targets=tuple(targets or ()), deadline_s=self._left())
        try:
            session = await self._runner.supplies.open_session(order)
        except UserError as error:
            self._broken = error
            raise
        self._session = session
        if self._over:
            session.revoke(self._closed_because())
        return session

    async def _wait(self, performance: Performance) -> Facts:
        verdict = asyncio.create_task(performance.verdict())
        waiters: set[asyncio.Task[Any]] = {verdict}
        if self._stop is not None:
            waiters.add(asyncio.create_task(self._stop.wait()))
        try:
            await asyncio.wait(waiters, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if verdict.done():
                return Facts(End.RETURNED, verdict.result())
            if self._stop is not None and self._stop.is_set():
                return Facts(End.STOPPED)
            assert self._timeout_s is not None
            return Facts(End.DEADLINE, where=await performance.where(), timeout_s=self._timeout_s)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)

    def _left(self) -> float | None:
        if self._timeout_s is None:
            return None
        return max(0.0, self._started + self._timeout_s - time.monotonic())

    def _closed_because(self) -> SessionClosedError:
        return SessionClosedError(f"episode {self._order.episode_id} is over: it takes no more model calls")

    def _episode(self, settlement: Settlement, verdict: Verdict | None) -> Episode:
        verdict = verdict or Verdict()
        calls, settlement = self._finish(settlement, verdict)
        task = self._order.workflow_task
        timings = {
            "total": time.monotonic() - self._started,
            "workflow": verdict.workflow_s,
            "judge": verdict.judge_s,
        }
        if self._session is not None:
            timings["model"] = sum(call.seconds for call in calls.tree.calls)
        return Episode(
            episode_id=self._order.episode_id,
            task_id=task.task_id,
            status=settlement.status,
            tree=calls.tree,
            ledger=calls.ledger,
            group_id=self._order.group_id,
            repeat=task.task_thread_index,
            tag=task.task_tag,
            reward=calls.reward,
            agent_rewards=calls.agent_rewards,
            is_success=settlement.is_success,
            outcomes=calls.outcomes,
            failure=settlement.failure,
            metadata=verdict.metadata,
            log_metrics=verdict.log_metrics,
            timings=timings,
        )

    def _finish(self, settlement: Settlement, verdict: Verdict) -> tuple[FinishedCalls, Settlement]:
        """The attempt's calls, and its settlement, which a missing or unfitting reward turns into a failure."""
        if self._session is None:  # it ended before it had a session
            return FinishedCalls(CallTree(), Ledger()), settlement
        tracker = self._session.tracker
        output = "\n".join(value for value in verdict.metadata.values() if isinstance(value, str))
        failed = settlement.reward is None and settlement.failure is not None
        try:
            calls = tracker.finish(settlement.reward, failed=failed, output=output)
        except RewardError as error:
            failure = Failure(type(error).__name__, str(error))
            return tracker.finish(None, failed=True), Settlement(EpisodeStatus.WORKFLOW_ERROR, failure=failure)
        if calls.reward is None and settlement.failure is None:
            no_reward = Failure("RewardError", NO_REWARD)
            settlement = replace(settlement, status=EpisodeStatus.WORKFLOW_ERROR, failure=no_reward)
        return calls, settlement


def _in_short(failure: Failure | None) -> str:
    return f"{failure.kind}: {failure.message}" if failure else "no reason given"
