"""`WorkflowAttempt`: one try at an episode, and the `AttemptRunner` that runs it.

`WorkflowResult`: what its workflow and judge returned, as plain data, and the spans that they emitted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from ajet.observe.tracing import Recording
from ajet.schema.episode import Failure
from ajet.schema.errors import (
    EngineError,
    EngineOverloadedError,
    GenerationTimeoutError,
    RewardError,
)
from ajet.schema.task import WorkflowOutput, WorkflowTask, finite_reward
from ajet.task_judge.base_judge import Later

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.gateway.chat import EpisodeSession
    from ajet.gateway.gateway import EpisodeKey
    from ajet.schema.episode import EnvironmentRecord
    from ajet.task_runner.tuner import AjetTuner

log = logging.getLogger("ajet.task_runner")


class EmittedSpans:
    """Used where user code runs. Until `begin`, nothing is recorded."""

    _warned = False

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._sink: Any = None

    def begin(self, tuner: Any, workflow_task: WorkflowTask) -> None:
        """The tuner is there: it says where spans go."""
        self._sink = tuner.span_sink()
        episode_id = workflow_task.episode_uuid or "episode"
        self._recording = Recording(self._sink.add, episode_id, episode_id.partition(".")[0])

    def recorded(self) -> AbstractContextManager[Any]:
        """Within this, user code may emit."""
        return nullcontext() if self._recording is None else self._recording.active()

    def give_reward(self, result: WorkflowResult) -> None:
        """The last reward that was emitted is the workflow's, if it returned none."""
        emitted = None if self._recording is None else self._recording.reward
        if emitted is None:
            return
        if result.reward is None:
            result.reward = emitted.value
            if len(emitted.dimensions) > 1:
                result.reward_parts = dict(emitted.dimensions)
                result.reward_weights = {name: 0.0 for name in emitted.dimensions}
                result.reward_weights[next(iter(emitted.dimensions))] = 1.0
        elif result.reward != emitted.value and not EmittedSpans._warned:
            EmittedSpans._warned = True
            log.warning(
                "a workflow returned the reward %s and emitted %s: what is returned counts (said once)",
                *(result.reward, emitted.value),
            )

    def end(self) -> None:
        """Workflow and judge have ended: deliver what is on its way, and drop what comes later."""
        if self._recording is not None:
            self._sink.flush()
            self._recording.close()


MOST_LEVELS = 32
MOST_VALUES = 100_000
MOST_CHARACTERS = 1_000_000
"""The limit for one text."""
LARGEST_BITS = 1000
"""Larger whole numbers don't fit into a float."""
TOO_MUCH = "(left out: more than is kept)"


def plain(value: Any) -> Any:
    """A copy of nested mappings and lists in which nothing is too deep, too many or too long. Arrays become lists."""
    return _Copy().of(value, MOST_LEVELS)


class _Copy:
    def __init__(self) -> None:
        self._left = MOST_VALUES

    def of(self, value: Any, levels: int) -> Any:
        self._left -= 1
        if self._left < 0 or (levels < 0 and isinstance(value, Mapping | list | tuple | set | frozenset)):
            return TOO_MUCH
        if isinstance(value, str):
            return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}… ({len(value)} characters)"
        if isinstance(value, bool | float) or value is None:
            return value
        if isinstance(value, int):
            return value if value.bit_length() <= LARGEST_BITS else f"(a whole number of {value.bit_length()} bits)"
        if isinstance(value, Mapping):
            return {self._key(key): self.of(item, levels - 1) for key, item in list(value.items())[:MOST_VALUES]}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.of(item, levels - 1) for item in list(value)[:MOST_VALUES]]
        if hasattr(value, "tolist") and hasattr(value, "shape"):  # of numpy or torch
            return self.of(value.tolist(), levels) if math.prod(value.shape) <= self._left + 1 else TOO_MUCH
        return value if _can_be_shown(value) else f"(an object of type {type(value).__name__})"

    def _key(self, key: Any) -> str:
        return key[:MOST_CHARACTERS] if isinstance(key, str) else shown(key)


def _can_be_shown(value: Any) -> bool:
    try:
        return len(repr(value)) <= MOST_CHARACTERS
    except Exception:  # noqa: BLE001 - user code: whatever its `__repr__` raises, the value can't be shown
        return False


def shown(value: Any, most: int = 200) -> str:
    """The beginning of a value's `repr`, whatever that does."""
    try:
        return repr(value)[:most]
    except Exception:  # noqa: BLE001 - user code, as above
        return f"(an object of type {type(value).__name__})"


ENGINE_CODES = frozenset({EngineError.code, EngineOverloadedError.code, GenerationTimeoutError.code})


@dataclass(slots=True)
class WorkflowResult:
    """What workflow and judge returned, or why they failed."""

    finished: bool = False
    """The workflow returned an output."""
    reward: float | list[float] | None = None
    """None if the workflow returned none and there is no judge, or if something failed."""
    is_success: bool | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_weights: dict[str, float] = field(default_factory=dict)
    later: Later | None = None
    """The judge decides once the episode or its group has ended; `reward` stands in until then."""
    judged: dict[str, Any] = field(default_factory=dict)
    """With `later`: the metadata that the judge was given, if not the workflow's."""
    metadata: dict[str, Any] = field(default_factory=dict)
    log_metrics: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    failed_in: Literal["", "workflow", "output", "judge", "isolation"] = ""
    """`output`: what the workflow returned, or a reward that it gave, is invalid. `isolation`: its process could not be
    started, or was lost with the one that forked it, or with its runner."""
    model_error: str = ""
    """Code of the model call's error that the workflow didn't catch (see `ajet.schema.errors`)."""
    environment_error: Literal["", "fault", "unavailable"] = ""
    """The environment's error that workflow or judge didn't catch (see `ajet.schema.errors`)."""
    bug: bool = False
    """No reply of the model can have caused the workflow's error (see `ajet.task_runner.results`)."""
    unjudged: Failure | None = None
    """Why the judge gave no reward to an episode that ended early."""
    debugger_quit: bool = False
    """The user quit the debugger, which ends the run."""
    prompts_used: list[str] | None = None
    """The prompt templates that the workflow asked for; None if nobody noted it."""
    workflow_s: float = 0.0
    judge_s: float = 0.0

    @property
    def engine_error(self) -> bool:
        """The workflow didn't catch the error of a model call that the engine failed to answer."""
        return self.model_error in ENGINE_CODES

    @property
    def explained(self) -> bool:
        """The error is a bug, or a fault of engine, judge, isolation or environment: no reply is to blame."""
        fault = self.engine_error or self.environment_error == "unavailable"
        return fault or self.bug or self.failed_in in ("judge", "isolation")

    def to_json(self) -> str:
        """Values that JSON can't represent become their `repr`."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name in ("failure", "unjudged", "later"):
            if plain[name] is not None:
                plain[name] = asdict(plain[name])
        return json.dumps(plain, default=_as_text)

    @classmethod
    def from_json(cls, text: str) -> WorkflowResult:
        """Read what `to_json` wrote. User code may have written to the same channel, so everything is checked.

        Raises `ValueError` or `RewardError`.
        """
        result: WorkflowResult = msgspec.convert(json.loads(text), cls)
        result.reward = finite_rewards(result.reward)
        return result


def finite_rewards(reward: Any) -> float | list[float] | None:
    """A workflow's reward as finite floats. Raises RewardError for anything else."""
    if reward is None:
        return None
    if isinstance(reward, list):
        if not reward:
            raise RewardError(
                "the workflow's reward is an empty list: return one number per model call, or None to ask the judge"
            )
        return [finite_reward(item, f"the workflow's reward[{index}]") for index, item in enumerate(reward)]
    return finite_reward(reward, "the workflow's reward")


def _as_text(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return repr(value)


class EarlyEnding(NamedTuple):
    """The model's own doing, which ended a workflow by an error that it didn't catch."""

    outcome: str
    last_reply: str

    def output(self) -> WorkflowOutput:
        """What the judge gets in place of the workflow's output."""
        return WorkflowOutput(metadata={"ended_early": self.outcome, "last_reply": self.last_reply})


AskEnding = Callable[[bool], Awaitable[EarlyEnding | None]]
"""`AttemptHandle.ended_early`, for who must wait for the answer."""


class AttemptHandle(NamedTuple):
    """What an `AttemptRunner` is given of an attempt."""

    workflow_task: WorkflowTask
    open_session: Callable[[list[str] | None], Awaitable[EpisodeSession]]
    """Opens the attempt's session, given the workflow's `trainable_targets`."""
    ended_early: Callable[[bool], EarlyEnding | None]
    """How the episode ended, once the workflow has raised. The argument: whether its error is `explained`. None: it
    wasn't the model's doing, or the judge isn't wanted."""
    on_judge: Callable[[], None] = lambda: None
    """Called when the judge begins, from any thread: if the deadline passes now, the judge is at fault."""


@dataclass(frozen=True, slots=True)
class WorkflowAttempt:
    """One try at an episode."""

    workflow_task: WorkflowTask
    """Its `episode_uuid` is unique to the attempt: a key of an earlier attempt must not open a later one."""
    group_id: str = ""
    step: int = 0
    """The training step. Together with the seed, it decides which tokens are sampled."""
    occurrence: int = 0
    """The index of its group among its task's groups in the step."""
    trainable_targets: tuple[str, ...] = ()
    deadline_s: float | None = None


class SessionProvider(Protocol):
    """Opens sessions, and gives workflows access to them."""

    config: Config
    loop: asyncio.AbstractEventLoop

    async def open_session(self, attempt: WorkflowAttempt) -> EpisodeSession:
        """A session with a fresh tracker. Waits for the tokenizer; raises a `UserError` if it can't be loaded."""
        ...

    def check_engine(self) -> None:
        """Raises a `UserError` if the engine failed to load: no later call can be answered either."""
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
        """What its environment was asked so far; None without an environment, or if it isn't known here."""
        return None

    async def where(self) -> str:
        """The stack of the user's code, to report when the deadline passes; empty if it isn't known here."""
        return ""

    def release(self) -> None:
        """End whatever still runs of the attempt. Returns at once."""
        ...


class AttemptRunner(Protocol):
    """Runs the user's code of attempts: in threads, or in processes."""

    async def ready(self) -> None:
        """Wait until attempts can begin. Doesn't count as an episode's time. Raises a `UserError`."""
        ...

    def begin(self, attempt: AttemptHandle) -> RunningAttempt: ...

    async def aclose(self) -> None: ...
