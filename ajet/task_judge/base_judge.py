"""`BaseJudge`: derive from it to turn an output into a reward; `GroupJudge`: to judge episodes after they have ended.

Also loads a config's judge, and checks what it returns.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ajet.config.kinds import JUDGES, load
from ajet.schema.chat import Message
from ajet.schema.errors import JudgeFault, RewardError
from ajet.schema.task import WorkflowOutput, WorkflowTask, finite_reward, scalar
from ajet.schema.user_code import built, check_method, import_class
from ajet.task_judge.symbolic import compared_by

if TYPE_CHECKING:
    from ajet.config import Config

JUDGE_KEY = "ajet.task_judge.judge_protocol"
RESERVED_PARTS = ("mean", "std", "min", "max")
"""Part names that metrics below `reward/` already use."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The validated result of a judge."""

    reward: float
    is_success: bool | None
    """None: it returned a bare number; `success_threshold` decides whether that is a success."""
    parts: dict[str, float] = field(default_factory=dict)
    """The named parts of the reward, before weighting."""
    weights: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    """What the judge has to say; the episode's `metadata["judge"]`."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward made of named parts: the sum of weight × part. A judge may return it; each part is recorded and
    plotted as `reward/<part>`."""

    parts: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    """A part that isn't named has weight 1."""
    is_success: bool | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the judge has to say, for the viewer: the episode's `metadata["judge"]`."""

    @property
    def total(self) -> float:
        return sum(self.weights.get(name, 1.0) * value for name, value in self.parts.items())


@dataclass(slots=True)
class Later:
    """The result of a judge that decides only once the episode, or its whole group, has ended: see `GroupJudge`."""

    kept: dict[str, Any] = field(default_factory=dict)
    """Plain data for `compute_group_rewards`."""


class BaseJudge:
    """Gives the reward of an episode whose workflow left `reward=None`.

    Built once as `Judge(config)`; `compute_reward` may be called from several threads concurrently, and may be `async`.
    """

    reads_output: ClassVar[tuple[str, ...]] = ()
    """Keys that it needs in `workflow_output.metadata`, for `ajet validate` to look for. Optional."""
    reads_task: ClassVar[tuple[str, ...]] = ()
    """Keys that it needs in `task.metadata`, likewise."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """Return `(reward, is_success)`, a number, a `Reward` of named parts, or an awaitable of these."""
        raise NotImplementedError(f"{type(self).__name__} must define `compute_reward(workflow_task, workflow_output)`")


class JudgedCall(NamedTuple):
    agent: str
    messages: list[Message]
    """The messages it added to the call that it continues; all of its messages if it continues none."""
    reply: Message


@dataclass(slots=True)
class JudgedEpisode:
    """An episode that has ended and waits for its reward."""

    workflow_task: WorkflowTask
    """Without `gym_env`: the environment is closed."""
    workflow_output: WorkflowOutput
    calls: list[JudgedCall] = field(default_factory=list)
    later: Later = field(default_factory=Later)
    """What `compute_reward` returned."""

    @property
    def last_reply(self) -> str:
        """The text of the last call that got a reply."""
        for call in reversed(self.calls):
            if isinstance(text := call.reply.get("content"), str) and text.strip():
                return text
        return str(self.workflow_output.metadata.get("last_reply") or "")


class GroupJudge(BaseJudge):
    """Judges episodes after they have ended, one at a time or a whole group together. It sees their calls.

    It runs in a separate thread of the process that runs the episodes, with a timeout of `rollout.episode_timeout` for
    each call; several threads may call it at the same time. Meanwhile no episode waits, and no environment is held. If
    it needs something from the environment, `compute_reward` asks for it: that runs where the workflow ran, and returns
    `Later`.
    """

    per_episode: bool = False
    """True: each episode is judged on its own as soon as it ends."""

    def prepare(self) -> None:
        """Called once before the first episode, in the process where the judge will decide. An error ends the run."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """Called where the workflow ran, while its environment is open. Return `Later` with the data that the judge
        needs afterwards."""
        return Later()

    def compute_group_rewards(self, episodes: Sequence[JudgedEpisode]) -> Any:
        """Return a list with one result for each of these episodes of one task, in any form that
        `BaseJudge.compute_reward` allows. May be `async`."""
        raise NotImplementedError(f"{type(self).__name__} must define `compute_group_rewards(episodes)`")


def has_judge(config: Config) -> bool:
    """Whether the config names a judge."""
    section = config.ajet.task_judge
    return section.judge_type in JUDGES or section.judge_protocol is not None


def load_judge(config: Config) -> BaseJudge | None:
    """The judge that `task_judge.judge_type` or `judge_protocol` names. None if neither does: workflows then return
    their own reward."""
    section = config.ajet.task_judge
    if section.judge_type in JUDGES:
        return build_judge(section.judge_type, config)
    if section.judge_protocol is None:
        return None
    return import_judge(section.judge_protocol, config, JUDGE_KEY)


def scored_by(config: Config) -> str:
    """The name of the judge that scores a run's episodes, and what its scores depend on besides the config."""
    section = config.ajet.task_judge
    own = section.judge_type if section.judge_type in JUDGES else section.judge_protocol
    if own is None:
        return "the workflow itself"
    judges = [own, *(part.judge for part in section.parts.values())] if own == "composite" else [own]
    names = ", ".join(name.rpartition("->")[2].strip() for name in judges)
    return f"{names} ({compared_by(section.math_verify)})" if "MathAnswerAsJudge" in names else names


def build_judge(kind: str, config: Config) -> BaseJudge:
    judge: BaseJudge = load(JUDGES, kind)(config)
    return judge


def import_judge(text: str, config: Config, key: str) -> BaseJudge:
    judge_class = import_class(text, BaseJudge, key=key, base_dirs=config.base_dirs)
    check_method(judge_class, BaseJudge, "def compute_reward(self, workflow_task, workflow_output)", key)
    return built(judge_class, key, "config", config)


def validate_reward(value: Any, judge_name: str = "the judge") -> Judgement:
    """`(finite number, bool)`, a bare finite number, including numpy's scalars, or a `Reward`; anything else is a
    `JudgeFault`.

    Nothing else counts as 0.0: a judge that forgot its `return` must not look like an agent that failed.
    """
    if isinstance(value, Judgement):
        return value
    if isinstance(value, Reward):
        return _of_parts(value, judge_name)
    if isinstance(value, tuple):
        if len(value) != 2:
            raise JudgeFault(f"{judge_name} returned {len(value)} values instead of (reward, is_success): {value!r}")
        reward, success = (scalar(part) for part in value)
        return Judgement(_reward(reward, judge_name), _success(success, judge_name))
    value = scalar(value)
    return Judgement(_reward(value, judge_name), value if isinstance(value, bool) else None)


def validate_rewards(value: object, count: int, judge_name: str) -> list[Judgement]:
    """What `compute_group_rewards` returned: a list of `count` results; anything else is a `JudgeFault`."""
    if not isinstance(value, list | tuple) or len(value) != count:
        said = f"{len(value)} of them" if isinstance(value, list | tuple) else f"a value of type {type(value).__name__}"
        raise JudgeFault(
            f"{judge_name}.compute_group_rewards should return a list of {count} rewards, one per episode, but "
            f"returned {said}"
        )
    return [validate_reward(each, judge_name) for each in value]


def _of_parts(reward: Reward, judge_name: str) -> Judgement:
    if not reward.parts:
        raise JudgeFault(f"{judge_name} returned a Reward without parts")
    for name in reward.parts:
        if not name or name in RESERVED_PARTS:
            raise JudgeFault(
                f"{judge_name} returned a Reward with a part named {name!r}: choose another name "
                f"({', '.join(RESERVED_PARTS)} are taken)"
            )
    if unknown := reward.weights.keys() - reward.parts.keys():
        raise JudgeFault(f"{judge_name} returned a Reward with a weight for {sorted(unknown)[0]!r}, which is no part")
    parts = {name: _reward(scalar(value), f"{judge_name}, part {name!r},") for name, value in reward.parts.items()}
    weights = {name: _reward(scalar(reward.weights.get(name, 1.0)), f"{judge_name}, as weight,") for name in parts}
    total = _reward(Reward(parts, weights).total, judge_name)
    return Judgement(total, _success(scalar(reward.is_success), judge_name), parts, weights, dict(reward.notes))


def _reward(reward: Any, judge_name: str) -> float:
    if isinstance(reward, bool):
        return float(reward)
    try:
        return finite_reward(reward, "a reward")
    except RewardError:
        hint = " (does compute_reward end without `return`?)" if reward is None else ""
        if isinstance(reward, Reward):
            hint = ": return the Reward alone, and say whether it is a success by its `is_success`"
        kind = type(reward).__name__
        raise JudgeFault(
            f"{judge_name} returned {reward!r:.80} of type {kind} as reward, not a finite number{hint}"
        ) from None


def _success(success: Any, judge_name: str) -> bool | None:
    if success is None or isinstance(success, bool):
        return success
    if isinstance(success, numbers.Real) and success in (0, 1):
        return bool(success)
    raise JudgeFault(f"{judge_name} returned {success!r} of type {type(success).__name__} as is_success, not a bool")
