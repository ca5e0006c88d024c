"""`TaskRunner.run`: one episode, start to end. The only place where an `Episode` of a workflow is made.

A failed episode is returned as data. The runner raises only when the run itself can't continue (`UserError`,
`LostThreadsError`) or when it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ajet.context_tracker import FinishedCalls
from ajet.schema.episode import CallTree, Episode, EpisodeStatus, Failure, Ledger
from ajet.schema.errors import LostThreadsError, RewardError, SessionClosedError, UserError
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.attempt import (
    AttemptHandle,
    AttemptRunner,
    EarlyEnding,
    RunningAttempt,
    SessionProvider,
    WorkflowAttempt,
    WorkflowResult,
)
from ajet.task_runner.breakpoints import debugging
from ajet.task_runner.endings import AttemptFacts, Ending, LateJudge, Stop, ending_of, judged_early, without_reward
from ajet.task_runner.results import describe

if TYPE_CHECKING:
    from ajet.gateway.chat import EpisodeSession

log = logging.getLogger(__name__)


class TaskRunner:
    """Runs episodes of one workflow. Lives on the service loop."""

    def __init__(self, sessions: SessionProvider, attempts: AttemptRunner, late_judge: LateJudge | None = None) -> None:
        self.sessions = sessions
        self.attempts = attempts
        config = sessions.config.ajet
        self.rules = config.failure_reward
        agent = config.rollout.agent
        self.program = agent.program or "the program" if agent is not None and agent.type == "cli" else None
        """An agent that is a program: one that never calls the model has failed, whatever else it did."""
        self.late_judge = late_judge
        self._warned_of_unjudged = False
        self._retries = config.rollout.episode_retries
        if config.task_runner.wrapper_type == "outside":
            self._retries = 0  # the external program would have to begin another
        self._timeout_s = config.rollout.episode_timeout
        if config.task_runner.wrapper_type == "multi-processing":
            self._timeout_s = min(self._timeout_s, config.task_runner.wrapper_multiprocessing_timeout)

    async def run(
        self,
        workflow_task: WorkflowTask,
        *,
        group_id: str = "",
        step: int = 0,
        occurrence: int = 0,
        stop: asyncio.Event | None = None,
    ) -> Episode:
        """Run the episode. If the engine was at fault, try again, up to `rollout.episode_retries` times.

        `rollout.episode_timeout` applies to each attempt. Setting `stop` ends the episode as `cancelled`.
        """
        stop = stop or asyncio.Event()
        base_id = workflow_task.episode_uuid or uuid.uuid4().hex
        for number in range(1, self._retries + 2):
            episode_id = base_id if number == 1 else f"{base_id}.{number}"
            await _ready(self.attempts, stop)
            task = workflow_task.model_copy(update={"episode_uuid": episode_id, "task": _own(workflow_task.task)})
            attempt = WorkflowAttempt(task, group_id, step, occurrence)
            episode, ending = await _AttemptRun(self, attempt, stop).run()
            episode.attempts = number
            if not ending.retry or number > self._retries or stop.is_set():
                break
            why = "no reason given" if ending.failure is None else ending.failure.in_short
            log.warning("episode %s: %s; running it again", episode_id, why)
        return episode

    def note_unjudged(self, failure: Failure) -> None:
        """The judge could give no reward to an episode that ended early: say so, once."""
        if self._warned_of_unjudged:
            return
        self._warned_of_unjudged = True
        otherwise = self.rules.otherwise
        log.warning(
            "the judge can't judge an episode that the model ended early (%s: %s), so such episodes %s "
            "(ajet.failure_reward.otherwise). It may look at workflow_output.metadata['ended_early'] and "
            "['last_reply']; or catch the error in the workflow and return what there is",
            failure.kind,
            failure.message,
            "are dropped" if otherwise is None else f"get the reward {otherwise:g}",
        )

    @property
    def timeout_s(self) -> float | None:
        """The time limit of an attempt; None while debugging."""
        return None if debugging() else self._timeout_s


class _AttemptRun:
    def __init__(self, runner: TaskRunner, attempt: WorkflowAttempt, stop: asyncio.Event) -> None:
        self._runner = runner
        self._attempt = attempt
        self._stop = stop
        self._session: EpisodeSession | None = None
        self._over = False
        self._judging = threading.Event()
        self._running: RunningAttempt | None = None
        self._session_error: UserError | None = None
        """Why no session can ever be opened."""
        self._timeout_s = runner.timeout_s
        self._started = time.monotonic()
        self._task = attempt.workflow_task.model_copy()
        """As it was given: the workflow may change its own."""

    async def run(self) -> tuple[Episode, Ending]:
        rules = self._runner.rules
        if self._stop.is_set():
            ending = ending_of(AttemptFacts(Stop.CANCELLED), rules)
            return self._episode(ending, None), ending
        handle = AttemptHandle(self._attempt.workflow_task, self._open_session, self._ended_early, self._judging.set)
        running = self._runner.attempts.begin(handle)
        self._running = running
        try:
            facts = await self._wait(running)
        finally:
            self._over = True
            if self._session is not None:
                self._session.revoke(self._closed_because())
            running.release()
        if self._session_error is not None:
            raise self._session_error
        if self._session is not None:
            facts.outcomes = frozenset(self._session.tracker.outcomes)
            facts.engine_failure = self._session.engine_failure
            if facts.engine_failure is not None:
                self._runner.sessions.check_engine()
        if facts.result is not None and facts.result.unjudged is not None:
            self._runner.note_unjudged(facts.result.unjudged)
        ending = ending_of(facts, rules)
        episode = self._episode(ending, facts.result)
        if ending.later and episode.usable and facts.result is not None:
            assert self._runner.late_judge is not None, "a judge returned Later, and there is nobody to ask later"
            self._runner.late_judge.expect(episode, self._attempt.workflow_task, facts.result)
        return episode, ending

    def _ended_early(self, explained: bool) -> EarlyEnding | None:
        """Asked once the workflow has raised. `explained`: see `WorkflowResult.explained`."""
        if self._session is None or self._over:
            return None
        tracker = self._session.tracker
        explained = explained or self._session.engine_failure is not None
        outcome = judged_early(frozenset(tracker.outcomes), self._runner.rules, explained=explained)
        return None if outcome is None else EarlyEnding(outcome, tracker.last_reply)

    async def _open_session(self, targets: list[str] | None) -> EpisodeSession:
        """Called once, when the workflow object exists."""
        attempt = replace(self._attempt, trainable_targets=tuple(targets or ()), deadline_s=self._left())
        try:
            session = await self._runner.sessions.open_session(attempt)
        except UserError as error:
            self._session_error = error
            raise
        self._session = session
        if self._over:
            session.revoke(self._closed_because())
        return session

    async def _wait(self, running: RunningAttempt) -> AttemptFacts:
        result = asyncio.create_task(running.result())
        waiters: set[asyncio.Task[Any]] = {result, asyncio.create_task(self._stop.wait())}
        try:
            await asyncio.wait(waiters, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if debugging():  # `breakpoint()` may have stopped meanwhile: the user has all the time in the world
                await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return AttemptFacts(Stop.RETURNED, _returned(result))
            if self._stop.is_set():
                return AttemptFacts(Stop.CANCELLED)
            assert self._timeout_s is not None
            late = self._judging.is_set()  # and not while the process shows where it is
            where = await running.where()
            if late:  # a missing reward, which says nothing about the model
                why = f"the judge had not decided when the episode's {self._timeout_s:g} s were over"
                failure = Failure("JudgeTimeout", f"ajet.rollout.episode_timeout: {why}", where)
                return AttemptFacts(Stop.RETURNED, WorkflowResult(finished=True, failure=failure, failed_in="judge"))
            return AttemptFacts(Stop.DEADLINE, where=where, timeout_s=self._timeout_s)
        finally:
            for waiter in waiters:
                waiter.cancel()
            await asyncio.gather(*waiters, return_exceptions=True)

    def _left(self) -> float | None:
        if self._timeout_s is None:
            return None
        return max(0.0, self._started + self._timeout_s - time.monotonic())

    def _closed_because(self) -> SessionClosedError:
        return SessionClosedError(f"episode {self._task.episode_uuid} is over: it takes no more model calls")

    def _episode(self, ending: Ending, result: WorkflowResult | None) -> Episode:
        result = result or WorkflowResult()
        calls, ending = self._finish(ending, result)
        timings = {
            "total": time.monotonic() - self._started,
            "workflow": result.workflow_s,
            "judge": result.judge_s,
        }
        if self._session is not None:
            timings["model"] = sum(call.seconds for call in calls.tree.calls)
        task = self._task
        whole = calls.reward is not None and not ending.by_rule  # a number of `failure_reward` has no parts
        return Episode(
            episode_id=self._task.episode_uuid,
            task_id=task.task_id,
            status=ending.status,
            tree=calls.tree,
            ledger=calls.ledger,
            group_id=self._attempt.group_id,
            repeat=task.task_thread_index,
            tag=task.task_tag,
            reward=calls.reward,
            agent_rewards=calls.agent_rewards,
            reward_parts=result.reward_parts if whole else {},
            reward_weights=result.reward_weights if whole else {},
            is_success=ending.is_success,
            outcomes=calls.outcomes,
            failure=ending.failure,
            metadata=result.metadata,
            log_metrics=result.log_metrics,
            timings=timings,
            environment=None if self._running is None else self._running.environment,
            prompt_version="" if task.prompts is None else task.prompts.version,
            prompts_used=result.prompts_used,
            began=0.0 if self._session is None else self._session.tracker.began,
            spans=[] if self._session is None else self._session.spans.spans,
            spans_left_out=0 if self._session is None else self._session.spans.left_out,
        )

    def _finish(self, ending: Ending, result: WorkflowResult) -> tuple[FinishedCalls, Ending]:
        """The attempt's calls and its ending: a failure, if the reward is missing or doesn't fit the calls."""
        if self._session is None:  # it ended before it had a session
            return FinishedCalls(CallTree(), Ledger()), ending
        tracker = self._session.tracker
        output = "\n".join(value for value in result.metadata.values() if isinstance(value, str))
        failed = ending.by_rule or (ending.failure is not None and not ending.open_by)
        otherwise = self._runner.rules.otherwise if ending.open_by else None
        try:
            calls = tracker.finish(
                ending.reward, failed=failed, output=output, otherwise=otherwise, masked=ending.masked
            )
        except RewardError as error:
            failure = Failure(type(error).__name__, str(error))
            return tracker.finish(None, failed=True), Ending(EpisodeStatus.WORKFLOW_ERROR, failure=failure)
        if calls.reward is None:
            ending = without_reward(ending)
        if self._runner.program is not None and not calls.tree.calls and ending.failure is None:
            failure = _never_called(self._runner.program, result)
            return FinishedCalls(CallTree(), Ledger()), Ending(EpisodeStatus.WORKFLOW_ERROR, failure=failure)
        return calls, ending


def _returned(result: asyncio.Task[WorkflowResult]) -> WorkflowResult:
    """An attempt's result. User code can break even what carries it (its event loop, say): that ends its episode alone.

    Raises what ends the run.
    """
    if result.cancelled():
        return WorkflowResult(failure=Failure("WorkflowFault", "the workflow was cut off"), failed_in="workflow")
    error = result.exception()
    if error is None:
        return result.result()
    if isinstance(error, UserError | LostThreadsError):
        raise error
    return WorkflowResult(failure=describe(error), failed_in="workflow")


def _never_called(program: str, result: WorkflowResult) -> Failure:
    """An episode without a model call teaches nothing."""
    code, printed = result.metadata.get("exit_code"), str(result.metadata.get("output") or "nothing")
    return Failure(
        "NoModelCall",
        f"{program} ended with exit code {code} and never called the model: check that its configuration names "
        f"{{base_url}} and {{api_key}}. The end of what it printed:\n{printed[-1000:]}",
    )


def _own(task: Task) -> Task:
    """A copy for one attempt: a workflow may append its replies to `init_messages`, which the group's others must not
    see, nor the next epoch."""
    return task.model_copy(update={"init_messages": _copied(task.init_messages), "metadata": _copied(task.metadata)})


def _copied(value: Any) -> Any:
    """Copy lists and dictionaries, but not the other objects that they hold."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if type(value) is list else value


async def _ready(attempts: AttemptRunner, stop: asyncio.Event) -> None:
    """Wait until an attempt can begin, or until nobody wants it any more. Raises a `UserError`.

    The caller goes on in the same turn of the loop: whoever else waits sees that this one has begun.
    """
    ended = False

    def end(_: asyncio.Task[Any]) -> None:
        if not ended:
            waiting.reschedule(asyncio.get_running_loop().time())

    stopped = asyncio.create_task(stop.wait())
    try:
        async with asyncio.timeout(None) as waiting:
            stopped.add_done_callback(end)
            await attempts.ready()
    except TimeoutError:
        if not waiting.expired():
            raise
    finally:
        ended = True
        stopped.cancel()
