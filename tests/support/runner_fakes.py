"""A session provider for runners under test: real sessions and clients, a small tracker, and a scripted engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ajet.config import Config, make_config
from ajet.context_tracker import FinishedCalls, TrackerSettings
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import Reply, ScriptedEngine
from ajet.gateway.chat import EpisodeSession, SessionSettings, pick_parser
from ajet.gateway.gateway import EpisodeKey, Gateway
from ajet.schema.chat import Completion, EngineCapabilities, GenerateRequest, Sampling
from ajet.schema.episode import CallTree, Episode, Ledger, Outcome
from ajet.schema.errors import ContextOverflowError, RewardError, UserError
from ajet.schema.task import Task
from ajet.task_judge.base_judge import BaseJudge
from ajet.task_runner.attempt import WorkflowAttempt
from ajet.task_runner.runner import TaskRunner
from ajet.task_runner.runtime import Runtime
from ajet.task_runner.threads import EpisodeThreads, ThreadRunner
from ajet.task_runner.tuner import AjetTuner
from ajet.workflow import Workflow

END = 0


class CharRenderer:
    """One token a character; 0 ends a turn."""

    end_ids = frozenset({END})

    def decode(self, token_ids: list[int], *, stopped_by: str | int | None = None) -> str:
        return "".join(chr(token) for token in token_ids if token != END)


@dataclass
class SmallPrepared:
    call_id: str
    prompt_ids: list[int]
    sampling: Sampling


@dataclass
class SmallTracker:
    max_model_len: int
    outcomes: set[Outcome] = field(default_factory=set)
    replies: list[Any] = field(default_factory=list)
    episode_reward: float | None = None
    began: float = 0.0
    _ids: Any = field(default_factory=itertools.count)

    @property
    def settings(self) -> TrackerSettings:
        return TrackerSettings(max_model_len=self.max_model_len)

    def new_bytes(self, agent: str, messages: Any, tools: Any) -> int:
        return 0

    def begin(self, agent, target, messages, tools, sampling, **_more):  # type: ignore[no-untyped-def]
        text = "".join(str(message.get("content")) for message in messages)
        room = self.max_model_len - len(text)
        if room <= 0:
            self.outcomes.add(Outcome.OVERFLOW)
            raise ContextOverflowError("maximum context length exceeded")
        return SmallPrepared(f"c{next(self._ids)}", [ord(c) for c in text], replace(sampling, max_tokens=room))

    def commit(self, call_id: str, completion: Completion, reply: dict[str, Any], **_more: Any) -> None:
        self.replies.append(reply)

    def abort(self, call_id: str, why: str) -> None: ...

    def reward(self, value: float, call: str | None = None, agent: str | None = None, *, replace: bool = False) -> None:
        self.episode_reward = value

    @property
    def last_reply(self) -> str:
        return str(self.replies[-1]["content"]) if self.replies else ""

    def finish(
        self,
        reward: Any,
        *,
        failed: bool = False,
        output: str | None = None,
        otherwise: float | None = None,
        masked: bool = False,
    ) -> FinishedCalls:
        if isinstance(reward, list):
            if len(reward) != len(self.replies):
                raise RewardError(f"{len(reward)} rewards for {len(self.replies)} model calls")
            reward = sum(reward)
        if reward is None and not failed:
            reward = otherwise if self.episode_reward is None else self.episode_reward
        return FinishedCalls(CallTree(), Ledger(), reward, outcomes=tuple(self.outcomes))


class LineEngine:
    """Says its line to everybody; an exception is raised instead. With several lines: one after the other."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines = list(lines)
        self.cancelled = 0
        self.gate: asyncio.Event | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("line")

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if isinstance(line, BaseException):
            raise line
        ids = [*map(ord, line), END]
        return Completion(ids, [-0.5] * len(ids), "stop", END)

    async def ready(self) -> None: ...
    async def load_weights(self, source: Any, version: int) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def aclose(self) -> None: ...


class SmallProvider:
    def __init__(self, config: Config, engine: LineEngine, *, max_model_len: int = 1000) -> None:
        self.config = config
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.sessions: list[EpisodeSession] = []
        self.attempts: list[WorkflowAttempt] = []
        self.gateway: Gateway | None = None
        self._starting = asyncio.Lock()
        self._max_model_len = max_model_len
        self.refusal: UserError | None = None
        """Why the engine could not load."""

    def check_engine(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def open_session(self, attempt: WorkflowAttempt) -> EpisodeSession:
        session = EpisodeSession(
            episode_id=attempt.workflow_task.episode_uuid,
            tracker=SmallTracker(self._max_model_len),
            renderer=CharRenderer(),
            engine=self.engine,
            parser=pick_parser(None),
            settings=SessionSettings(trainable_targets=attempt.trainable_targets),
            deadline_s=attempt.deadline_s,
        )
        self.sessions.append(session)
        self.attempts.append(attempt)
        return session

    def tuner(self, session: EpisodeSession) -> AjetTuner:
        return AjetTuner(session, self.config, self.loop)

    async def access(self, session: EpisodeSession) -> EpisodeKey:
        async with self._starting:
            if self.gateway is None:
                gateway = Gateway()
                await gateway.start()
                self.gateway = gateway
        return self.gateway.register(session)


def runner_of(
    workflow: type[Workflow],
    *lines: str | BaseException,
    judge: type[BaseJudge] | None = None,
    max_model_len: int = 1000,
    grace_s: float = 0.2,
    max_lost: int = 8,
    **overrides: Any,
) -> TaskRunner:
    """A runner of `workflow` in threads. `overrides`: config keys, `__` for a dot."""
    config = make_config({key.replace("__", "."): value for key, value in overrides.items()})
    sessions = SmallProvider(config, LineEngine(*(lines or ("hello",))), max_model_len=max_model_len)
    threads = EpisodeThreads(max_lost, grace_s=grace_s)
    return TaskRunner(sessions, ThreadRunner(workflow, judge(config) if judge else None, sessions, threads))


def played(settings: dict[str, Any], replies: Sequence[Reply], task: Task) -> Episode:
    """One episode of a whole runtime, whose engine gives these replies."""
    engine = ScriptedEngine(replies, lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    with Runtime(make_config(settings), make_engine=lambda _: engine) as runtime:
        return runtime.run(runtime.pool.run_episode(task))
