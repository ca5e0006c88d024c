"""What goes into an episode, and what the user's workflow returns."""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from decimal import Decimal
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from ajet.schema.errors import RewardError
from ajet.schema.resources import PromptSet


class Task(BaseModel):
    """One problem, as a task reader delivers it."""

    model_config = ConfigDict(extra="forbid")  # `question=…` would be lost

    main_query: str = ""
    init_messages: list[dict[str, Any]] = Field(default_factory=list)
    task_id: str = ""
    env_type: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)


class WorkflowTask(BaseModel):
    """A workflow's input: the task, and the episode's place in the batch."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    task: Task
    task_id: str = ""
    env_type: str = ""
    episode_uuid: str = ""
    task_batch_index: int = 0
    """Which task of the batch."""
    task_thread_index: int = 0
    """Which repeat of that task (0 … num_repeat-1)."""
    task_tag: str = ""
    """A label for per-tag metrics, taken from the task's metadata (`tag`)."""
    validation: bool = False
    """Whether the episode only measures: its tokens are not trained."""
    prompts: PromptSet | None = None
    """The prompt templates of this episode: those of the YAML, or of a candidate that is being tried."""
    gym_env: Any = None
    _tuner: Any = PrivateAttr(default=None)

    def remember_tuner(self, tuner: Any) -> None:
        """Called before the workflow runs. The properties below read the tuner: `sandbox` for judges, the others for
        old files."""
        self._tuner = tuner

    @property
    def sandbox(self) -> Any:
        """The episode's sandbox, for a judge. None: there is none, or not here."""
        return None if self._tuner is None else self._tuner.sandbox

    @property
    def tokenizer(self) -> Any:
        return self._tuner.tokenizer

    @property
    def llm_inference_fn(self) -> Any:
        """`tuner.llm_inference_fn`: awaits messages, returns the reply."""
        return self._tuner.llm_inference_fn

    @cached_property
    def observation_window(self) -> dict[str, defaultdict[int, Any]]:
        """Progress that old workflows write, by `task_thread_index`. Nothing reads it, and `stop` and `hard_stop` are
        always false: deadlines end episodes."""
        kinds: dict[str, type[Any]] = {"info": str, "step": int, "token": int, "stop": bool, "hard_stop": bool}
        return {name: defaultdict(kind) for name, kind in kinds.items()}


class WorkflowOutput(BaseModel):
    """What a workflow returns. `reward=None` asks the judge; a list holds one reward per model call."""

    model_config = ConfigDict(extra="forbid")  # `log_metric=…` would be lost

    reward: float | list[float] | None = None
    is_success: bool | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    log_metrics: dict[str, Any] = Field(default_factory=dict)


def scalar(value: Any) -> Any:
    """A scalar of numpy or torch as Python's own; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def finite_reward(value: Any, source: str) -> float:
    """A reward as a Python float; scalars of numpy and torch are accepted. Raises RewardError for anything else.

    Every entry point for rewards (workflow, judge, tuner, gateway) calls this once, and later code relies on it.
    """
    value = scalar(value)
    is_number = isinstance(value, numbers.Real | Decimal) and not isinstance(value, bool)
    if is_number:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    try:
        said = repr(value)[:80]
    except Exception:  # noqa: BLE001 - of a user's class, or a number with too many digits
        said = f"an object of type {type(value).__name__}"
    raise RewardError(f"{source} must be a finite number, not {said}")
