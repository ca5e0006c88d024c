"""`BaseJudge`: derive from it to turn an output into a reward. Also loads a config's judge and checks what it
returns."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.schema.errors import FeatureUnavailableError, JudgeFault, RewardError
from ajet.schema.task import WorkflowOutput, WorkflowTask, finite_reward
from ajet.user_code import import_class

if TYPE_CHECKING:
    from ajet.config import Config

JUDGE_KEY = "ajet.task_judge.judge_protocol"


class Judgement(NamedTuple):
    """What a judge returned, checked."""

    reward: float
    is_success: bool | None
    """None: it returned a bare number; `success_threshold` decides whether that is a success."""


class BaseJudge:
    """Gives the reward of an episode whose workflow left `reward=None`.

    Built once as `Judge(config)`; `compute_reward` may be called from several threads concurrently, and may be `async`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """Return `(reward, is_success)`, or an awaitable of it."""
        raise NotImplementedError(f"{type(self).__name__} must define `compute_reward(workflow_task, workflow_output)`")


def load_judge(config: Config, base_dirs: Sequence[Path] = ()) -> BaseJudge | None:
    """Import and build `task_judge.judge_protocol`. None if that is null: workflows then return their own reward."""
    section = config.ajet.task_judge
    if section.judge_type == "rubrics_auto_grader":
        raise FeatureUnavailableError(
            "ajet.task_judge.judge_type: 'rubrics_auto_grader' is not available in this version. "
            "Use 'customized_protocol' with your own judge in ajet.task_judge.judge_protocol"
        )
    if section.judge_protocol is None:
        return None
    return import_class(section.judge_protocol, BaseJudge, key=JUDGE_KEY, base_dirs=base_dirs)(config)


def validate_reward(value: Any, judge_name: str = "the judge") -> Judgement:
    """`(finite number, bool)` or a bare finite number, including numpy's scalars; anything else is a `JudgeFault`.

    Nothing else counts as 0.0: a judge that forgot its `return` must not look like an agent that failed.
    """
    if isinstance(value, tuple):
        if len(value) != 2:
            raise JudgeFault(f"{judge_name} returned {len(value)} values instead of (reward, is_success): {value!r}")
        reward, success = (_plain(part) for part in value)
        return Judgement(_reward(reward, judge_name), _success(success, judge_name))
    value = _plain(value)
    return Judgement(_reward(value, judge_name), value if isinstance(value, bool) else None)


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as Python's own type."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def _reward(reward: Any, judge_name: str) -> float:
    if isinstance(reward, bool):
        return float(reward)
    try:
        return finite_reward(reward, "a reward")
    except RewardError:
        hint = " (does compute_reward end without `return`?)" if reward is None else ""
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
