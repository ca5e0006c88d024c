"""`perform`: the user's workflow, then the judge; and `Verdict`, what came of them.

Runs where user code runs: in an episode's thread, or in its process. A `Verdict` is plain data (`to_json`): from a
process only JSON comes back.
"""

from __future__ import annotations

import bdb
import inspect
import json
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ajet.schema.episode import Failure
from ajet.schema.errors import JudgeFault, ModelCallError, RewardError, WorkflowFault
from ajet.schema.task import WorkflowOutput, WorkflowTask, finite_reward
from ajet.task_judge.base_judge import BaseJudge, judge
from ajet.task_runner.threads import WorkflowInterrupted
from ajet.workflow import Workflow

log = logging.getLogger(__name__)

OpenTuner = Callable[[list[str] | None], Awaitable[Any]]
"""Given the workflow's `trainable_targets`, opens the episode's session and gives the tuner."""


@dataclass(slots=True)
class Verdict:
    """What workflow and judge said, or why they could not."""

    finished: bool = False
    """The workflow returned an output."""
    reward: float | list[float] | None = None
    """Finite. None if the workflow gave none and there is no judge, or something failed."""
    is_success: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    log_metrics: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    failed_in: str = ""
    """`workflow`, `judge`, or `isolation`: its process could not be started."""
    model_error: str = ""
    """Code of the model call's error that the workflow let through (see `ajet.schema.errors`)."""
    debugger_quit: bool = False
    """The user left the debugger: the run is to end."""
    workflow_s: float = 0.0
    judge_s: float = 0.0

    def to_json(self) -> str:
        """Values that JSON doesn't know become their `repr`, said once a field."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.failure is not None:
            plain["failure"] = [self.failure.kind, self.failure.message, self.failure.traceback]
        return json.dumps(plain, default=_as_text)

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        """Read what `to_json` wrote, in a process that may be of any mind: types are checked."""
        plain = json.loads(text)
        failure = plain.pop("failure")
        verdict = cls(**plain, failure=Failure(*map(str, failure)) if failure else None)
        verdict.reward = finite_rewards(verdict.reward)
        return verdict


async def perform(
    workflow_class: type[Workflow],
    judge_: BaseJudge | None,
    workflow_task: WorkflowTask,
    open_tuner: OpenTuner,
    *,
    judge_retries: int = 0,
    on_judge: Callable[[], None] = lambda: None,
) -> Verdict:
    """Run the workflow, then the judge if it left the reward open. Raises nothing but `WorkflowInterrupted`.

    A cancellation is an end like any other: if it was ours, nobody reads the verdict.
    """
    started = time.perf_counter()
    verdict = Verdict()
    try:
        output = await _execute(workflow_class, workflow_task, open_tuner)
        verdict.finished = True
        verdict.reward, verdict.is_success = output.reward, output.is_success
        verdict.metadata, verdict.log_metrics = output.metadata, output.log_metrics
        verdict.reward = finite_rewards(output.reward)
    except WorkflowInterrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - user code: whatever it raises, sys.exit included, is this episode's end
        verdict.finished = False
        verdict.reward = None
        _blame(verdict, "workflow", error)
    verdict.workflow_s = time.perf_counter() - started
    if verdict.finished and verdict.reward is None and judge_ is not None:
        started = time.perf_counter()
        on_judge()
        await _judge(verdict, judge_, workflow_task, output, judge_retries)
        verdict.judge_s = time.perf_counter() - started
    return verdict


async def _execute(
    workflow_class: type[Workflow], workflow_task: WorkflowTask, open_tuner: OpenTuner
) -> WorkflowOutput:
    workflow = workflow_class(name=workflow_class.__name__)
    tuner = await open_tuner(workflow.trainable_targets)
    output: Any = workflow.execute(workflow_task, tuner)
    if inspect.isawaitable(output):
        output = await output
    if not isinstance(output, WorkflowOutput):
        raise WorkflowFault(
            f"{workflow_class.__name__}.execute returned {output!r:.200} of type {type(output).__name__}, "
            "not a WorkflowOutput"
        )
    return output


async def _judge(
    verdict: Verdict, judge_: BaseJudge, workflow_task: WorkflowTask, output: WorkflowOutput, retries: int
) -> None:
    """Judging again costs no model calls, so a judge that raised is asked again; one that answered wrongly is not."""
    for attempt in range(retries + 1):
        try:
            judgement = await judge(judge_, workflow_task, output)
        except WorkflowInterrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - user code, as above
            verdict.failure = None
            _blame(verdict, "judge", error)
            if isinstance(error, JudgeFault) or verdict.debugger_quit:
                return
            if attempt < retries:
                log.warning("the judge raised %s: %s; asking it again", type(error).__name__, error)
        else:
            verdict.failure, verdict.failed_in, verdict.model_error = None, "", ""
            verdict.reward = judgement.reward
            if output.is_success is None:
                verdict.is_success = judgement.is_success
            return


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


def _blame(verdict: Verdict, where: str, error: BaseException) -> None:
    verdict.failed_in = where
    verdict.failure = describe(error)
    verdict.model_error = model_error_code(error)
    verdict.debugger_quit = any(isinstance(link, bdb.BdbQuit) for link in chain(error))


def describe(error: BaseException) -> Failure:
    """An exception as data, its traceback without the part that is ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(type(error).__name__, str(error) or repr(error), text)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and the members of groups."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions


def _codes(family: type[ModelCallError]) -> Iterator[str]:
    yield family.code
    for child in family.__subclasses__():
        yield from _codes(child)


MODEL_ERROR_CODES = frozenset(_codes(ModelCallError))


def model_error_code(error: BaseException) -> str:
    """The code of the model call's error among the causes of `error`: ours, or the same in a client library's shape."""
    for link in chain(error):
        code = getattr(link, "code", None)
        if isinstance(code, str) and code in MODEL_ERROR_CODES:
            return code
    return ""


def _as_text(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return repr(value)
