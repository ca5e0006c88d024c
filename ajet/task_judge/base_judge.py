"""`BaseJudge`: the class a user derives from to say what an output is worth; and the checks on what it says."""

from __future__ import annotations

import inspect
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

from ajet.schema.errors import JudgeFault, RewardError
from ajet.schema.task import WorkflowOutput, WorkflowTask, finite_reward

if TYPE_CHECKING:
    from ajet.config import Config


class Judgement(NamedTuple):
    """What a judge said, checked."""

    reward: float
    is_success: bool | None
    """None: it gave a bare number; whether that is a success follows from `success_threshold`."""


class BaseJudge:
    """Gives the reward of an episode whose workflow left `reward=None`.

    Built once as `Judge(config)`; `compute_reward` may be called from several threads at once, and may be `async`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Any:
        """Return `(reward, is_success)`, or an awaitable of it."""
        raise NotImplementedError(f"{type(self).__name__} must define `compute_reward(workflow_task, workflow_output)`")


async def judge(judge: BaseJudge, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
    """Ask a judge, sync or async. What it raises passes through; what it returns is checked."""
    value = judge.compute_reward(workflow_task, workflow_output)
    if inspect.isawaitable(value):
        value = await value
    return validate_reward(value, type(judge).__name__)


def validate_reward(value: Any, judge_name: str = "the judge") -> Judgement:
    """`(finite number, bool)` or a bare finite number, numpy's scalars included; all else is a `JudgeFault`.

    Nothing is ever read as 0.0: a judge that forgot its `return` must not look like an agent that failed.
    """
    if isinstance(value, tuple):
        if len(value) != 2:
            raise JudgeFault(f"{judge_name} returned {len(value)} values instead of (reward, is_success): {value!r}")
        reward, success = (_plain(part) for part in value)
        return Judgement(_reward(reward, judge_name), _success(success, judge_name))
    value = _plain(value)
    return Judgement(_reward(value, judge_name), value if isinstance(value, bool) else None)


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as Python's own."""
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
