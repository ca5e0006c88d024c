"""`ExternalEpisodes`: episodes that programs elsewhere begin and end, as groups: `num_repeat` of one task id make one.

Lives on the service loop. Training takes complete groups in the order in which they were completed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ajet.schema.episode import Episode, EpisodeGroup, EpisodeStatus, Failure
from ajet.schema.errors import ConfigError, EngineOverloadedError, InvalidRequestError, SessionClosedError
from ajet.schema.task import Task, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.attempt import AttemptHandle, RunningAttempt, SessionProvider, WorkflowResult
from ajet.task_runner.endings import JudgeHere, leave_without

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.gateway.gateway import EpisodeKey
    from ajet.task_runner.pool import RolloutPool

log = logging.getLogger(__name__)


class ExternalRunner:
    """Waits for attempts to be ended."""

    def __init__(self, sessions: SessionProvider, judge: BaseJudge | None) -> None:
        self.sessions = sessions
        self.judge = JudgeHere(judge, sessions.config.ajet.rollout.episode_retries)
        self._attempts: dict[str, OutsideAttempt] = {}
        self._keys: dict[str, asyncio.Future[EpisodeKey]] = {}

    def key_of(self, episode_id: str) -> asyncio.Future[EpisodeKey]:
        """How the program reaches the model, once the attempt has a session."""
        if episode_id not in self._keys:
            self._keys[episode_id] = asyncio.get_running_loop().create_future()
        return self._keys[episode_id]

    async def ready(self) -> None:
        """Nothing to wait for: a program that begins an episode is ready."""

    def begin(self, attempt: AttemptHandle) -> RunningAttempt:
        running = self._attempts[attempt.workflow_task.episode_uuid] = OutsideAttempt(self, attempt)
        return running

    def find(self, episode_id: str) -> OutsideAttempt | None:
        return self._attempts.get(episode_id)

    def forget(self, episode_id: str) -> None:
        self._attempts.pop(episode_id, None)
        if (key := self._keys.pop(episode_id, None)) is not None:
            key.cancel()

    async def aclose(self) -> None:
        self._attempts.clear()
        await self.judge.aclose()


class OutsideAttempt(RunningAttempt):
    """One attempt, from the first request to the last."""

    def __init__(self, runner: ExternalRunner, attempt: AttemptHandle) -> None:
        self._runner = runner
        self._attempt = attempt
        self._episode_id = attempt.workflow_task.episode_uuid
        self._end: asyncio.Future[WorkflowResult] = asyncio.get_running_loop().create_future()

    def end(self, result: WorkflowResult) -> bool:
        """The program says that it is over. False: it was over already."""
        if self._end.done():
            return False
        self._end.set_result(result)
        return True

    async def result(self) -> WorkflowResult:
        session = await self._attempt.open_session(None)
        self._runner.key_of(self._episode_id).set_result(await self._runner.sessions.access(session))
        result = await self._end
        await self._runner.judge.decide(result, self._attempt)
        return result

    def release(self) -> None:
        self._runner.forget(self._episode_id)


KEY_VARIABLE = "AJET_SERVICE_KEY"
"""It holds the key with which programs begin episodes."""
SHORTEST_KEY = 16
PATIENCE_GROUPS = 16
"""After the episodes of so many groups have ended without completing one, the user is warned."""
LONGEST_ID = 200
"""Characters of a task's id."""
NO_TASK = "outside"
"""The task id of episodes that name none."""


def service_key() -> str:
    """The key with which programs begin episodes. Raises ConfigError."""
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"ajet.task_runner.wrapper_type: outside needs a key in the environment's {KEY_VARIABLE}, of at least "
            f"{SHORTEST_KEY} characters\n    export {KEY_VARIABLE}=sk-ajet-$(openssl rand -hex 24)"
        )
    return key


class ExternalEpisodes:
    """What the gateway asks, and what training takes."""

    def __init__(
        self,
        config: Config,
        attempts: ExternalRunner,
        pool: RolloutPool,
        *,
        on_start: Callable[[WorkflowTask], None] = lambda workflow_task: None,
    ) -> None:
        self.service_key = service_key()
        self._attempts = attempts
        self._pool = pool
        self._size = config.ajet.rollout.num_repeat
        self._most = config.ajet.rollout.max_env_worker
        self._max_staleness = config.ajet.task_runner.outside.max_staleness
        self._deadline_s = config.ajet.rollout.episode_timeout
        self._on_start = on_start
        self._running: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._gathered: defaultdict[str, list[Episode]] = defaultdict(list)
        """By task id: episodes of a group that is not complete."""
        self._groups: deque[EpisodeGroup] = deque()
        self._completed = asyncio.Event()
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._tasks: dict[str, Task] = {}
        self.untrained: list[Episode] = []
        """Once it is closed: those that had ended before the run took their group."""
        self._step = 1
        self._error: Exception | None = None
        """What ends the run."""
        self._fruitless = 0
        """Episodes that have ended since the last complete group or warning."""

    def say_how(self, base_url: str) -> None:
        log.warning("waiting for episodes from outside: POST %s/episodes with the key in %s", base_url, KEY_VARIABLE)

    # ------------------------------------------------------------ the gateway's side

    async def begin(self, task: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode. Raises a ModelCallError."""
        if self._stop.is_set():
            raise SessionClosedError("the run is ending: it begins no more episodes")
        if len(self._running) >= self._most:
            raise EngineOverloadedError(
                f"{self._most} episodes are open (ajet.rollout.max_env_worker): try again later"
            )
        if unknown := task.keys() - Task.model_fields.keys():
            raise InvalidRequestError(f"task has no field {min(unknown)!r:.80}; fields: {', '.join(Task.model_fields)}")
        try:
            given = Task.model_validate(task)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidRequestError(f"task.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if len(given.task_id) > LONGEST_ID:
            raise InvalidRequestError(
                f"task.task_id: {len(given.task_id)} characters, at most {LONGEST_ID} are allowed: "
                "a text belongs into main_query"
            )
        given.task_id = given.task_id or NO_TASK
        episode_id = uuid.uuid4().hex
        self._tasks[episode_id] = given
        occurrence, repeat = divmod(self._counts[given.task_id], self._size)
        self._counts[given.task_id] += 1
        work = WorkflowTask(
            task=given,
            task_id=given.task_id,
            env_type=given.env_type,
            episode_uuid=episode_id,
            task_thread_index=repeat,
            task_tag=str(given.metadata.get("tag") or ""),
        )
        opened = self._attempts.key_of(episode_id)
        running = asyncio.create_task(self._run(work, occurrence))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        both: set[asyncio.Future[Any]] = {opened, running}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the program has left: it would never hear of an episode to end
            running.cancel()
            del self._tasks[episode_id]
            raise
        if not opened.done() or opened.cancelled():
            raise SessionClosedError("the run is ending: it begins no more episodes")
        key = opened.result()
        return {
            "episode_id": episode_id,
            "base_url": key.base_url,
            "api_key": key.api_key,
            "control_key": key.control_key,
            "model": key.model,
            "deadline": self._deadline_s,
        }

    def end(self, episode_id: str, outcome: dict[str, Any]) -> None:
        """End an episode. Raises a ModelCallError."""
        result = WorkflowResult(
            finished=not outcome["failure"],
            reward=outcome["reward"],
            is_success=outcome["is_success"],
            metadata=outcome["metadata"],
        )
        if outcome["failure"]:
            result.failed_in, result.failure = "workflow", Failure("OutsideFailure", outcome["failure"][:2000])
        attempt = self._attempts.find(episode_id)
        if attempt is None or not attempt.end(result):
            raise SessionClosedError(f"episode {episode_id} is over")

    # ------------------------------------------------------------ training's side

    async def next_groups(self, count: int, step: int) -> list[EpisodeGroup]:
        """The next `count` complete groups, and those between them that went stale.

        Raises what no episode can be run after, such as a UserError."""
        self._step = step
        chosen: list[EpisodeGroup] = []
        try:
            while (lacking := count - sum(group.complete for group in chosen)) > 0:
                if self._error is not None:
                    raise self._error
                if self._groups:
                    chosen += [
                        self._fresh(self._groups.popleft(), step) for _ in range(min(lacking, len(self._groups)))
                    ]
                    continue
                self._completed.clear()
                await self._completed.wait()
        except BaseException:
            self._groups.extendleft(reversed(chosen))
            raise
        return chosen

    def task_of(self, episode_id: str) -> Task | None:
        """The task that this episode began with. It is forgotten here: ask once, for the record."""
        return self._tasks.pop(episode_id, None)

    async def aclose(self) -> None:
        """End all episodes as cancelled."""
        self._stop.set()
        self._pool.stop_all()
        await asyncio.gather(*self._running, return_exceptions=True)
        for task_id, members in self._gathered.items():  # of groups that the judge will never see
            await self._pool.settle_group(task_id, [], members)
            self.untrained += members
        for group in self._groups:
            self.untrained += [*group.episodes, *group.failed]
        for episode in self.untrained:
            if episode.usable:
                _leave_untrained(episode, "RunEnded", "the run ended before it trained this episode's group")

    # ------------------------------------------------------------ between them

    async def _run(self, work: WorkflowTask, occurrence: int) -> None:
        self._on_start(work)
        try:
            episode = await self._pool.runner.run(work, step=self._step, occurrence=occurrence, stop=self._stop)
            await self._pool.conclude(episode, self._stop, in_group=True)
            await self._gather(episode)
        except Exception as error:  # noqa: BLE001 - `next_groups` raises it: training waits there
            self._error = error
            self._completed.set()

    async def _gather(self, episode: Episode) -> None:
        members = self._gathered[episode.task_id]
        members.append(episode)
        if sum(member.usable for member in members) >= self._size:
            del self._gathered[episode.task_id]
            self._fruitless = 0
            await self._complete(episode.task_id, members)
        else:
            self._warn_if_fruitless(episode)

    def _warn_if_fruitless(self, last: Episode) -> None:
        """Warn if many episodes have ended without completing a group, because training waits for groups."""
        self._fruitless += 1
        if self._fruitless < PATIENCE_GROUPS * self._size:
            return
        waiting = [members for members in self._gathered.values() if any(member.usable for member in members)]
        if not waiting:
            why = "none was usable" if last.failure is None else f"none was usable; the last: {last.failure.in_short}"
        else:
            why = f"they belong to {len(waiting)} task ids: give those that should be compared the same task_id"
        log.warning(
            "%d episodes have ended, and no group of %d (ajet.rollout.num_repeat) became complete: %s",
            *(self._fruitless, self._size, why),
        )
        self._fruitless = 0

    async def _complete(self, task_id: str, members: list[Episode]) -> None:
        group_id = f"outside-{uuid.uuid4().hex[:12]}-{task_id}"
        usable = [member for member in members if member.usable]
        others = [member for member in members if not member.usable]
        for member in members:
            member.group_id = group_id
        await self._pool.settle_group(group_id, usable, others)
        judged = [member for member in usable if member.usable]
        failed = [*others, *(member for member in usable if not member.usable)]
        self._groups.append(EpisodeGroup(group_id, task_id, judged, failed, complete=len(judged) >= min(2, self._size)))
        self._completed.set()

    def _fresh(self, group: EpisodeGroup, step: int) -> EpisodeGroup:
        """The group without episodes that were sampled too many updates ago; incomplete, if too few are left."""
        stale = [episode for episode in group.episodes if _age(episode, step) > self._max_staleness]
        for episode in stale:
            why = f"sampled {_age(episode, step)} updates ago (ajet.task_runner.outside.max_staleness)"
            _leave_untrained(episode, "EpisodeStale", why)
        kept = [episode for episode in group.episodes if episode.usable]
        complete = group.complete and len(kept) >= min(2, self._size)
        if not complete:
            log.warning("a group of task %s is not trained: too few of its episodes are recent enough", group.task_id)
        return EpisodeGroup(group.group_id, group.task_id, kept, [*group.failed, *stale], complete)


def _leave_untrained(episode: Episode, kind: str, why: str) -> None:
    """It counts in no mean. What its user thought of it stays in the record."""
    leave_without(episode, EpisodeStatus.CANCELLED, Failure(kind, f"{why}; its reward was {episode.reward:g}"))


def _age(episode: Episode, step: int) -> int:
    """Updates since its first token was sampled."""
    versions = [version for call in episode.tree.calls for _, version in call.versions]
    return step - 1 - min(versions, default=step - 1)
