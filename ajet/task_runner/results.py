"""`run_workflow`: the user's workflow, then the judge. A `WorkflowResult` holds what they returned, or why they failed.

Runs where user code runs: in an attempt's thread, or in its process. `describe` makes an exception plain data, as a
process sends it back. Its message says what to write instead, in the first line: an episode's line in the log and on
the terminal shows no other.
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from ajet.environment.leased import LeasedEnvironment
from ajet.environment.sandboxes import SandboxError, UnusableResultError
from ajet.schema.episode import Failure
from ajet.schema.errors import (
    PACKAGE,
    AjetError,
    EnvironmentFault,
    EnvironmentUnavailableError,
    JudgeFault,
    ModelCallError,
    RewardError,
    UserError,
    WorkflowFault,
    address_of,
    error_chain,
)
from ajet.schema.install import written_for_another_agentscope
from ajet.schema.task import WorkflowOutput, WorkflowTask, scalar
from ajet.task_judge.base_judge import BaseJudge, Judgement, Later, validate_reward
from ajet.task_judge.helper import HelperBudgetError, HelperError
from ajet.task_runner.attempt import AskEnding, EarlyEnding, EmittedSpans, WorkflowResult, finite_rewards, plain, shown
from ajet.task_runner.environments import LeasedSandbox, enter
from ajet.task_runner.thread_control import WorkflowInterrupted, call_off_loop
from ajet.task_runner.thread_control import __file__ as THREAD_CONTROL_FILE
from ajet.task_runner.workflow import Workflow

log = logging.getLogger(__name__)

T = TypeVar("T")
OpenTuner = Callable[[list[str] | None], Awaitable[Any]]
"""Given the workflow's `trainable_targets`, opens the attempt's session and returns the tuner."""

MOST_MESSAGE_CHARACTERS = 20_000
MOST_ERROR_CHARACTERS = 200_000
"""The limit for a traceback."""


async def run_workflow(
    workflow_class: type[Workflow],
    judge_: BaseJudge | None,
    workflow_task: WorkflowTask,
    open_tuner: OpenTuner,
    *,
    judge_retries: int = 0,
    ask_ending: AskEnding | None = None,
    on_judge: Callable[[], None] = lambda: None,
    environment: LeasedEnvironment | None = None,
    sandbox: LeasedSandbox | None = None,
) -> WorkflowResult:
    """Run the workflow, then the judge if there is no reward yet. User code's exceptions are in the result.

    If the workflow raised because of the model's own doing, the judge is asked as well, unless `ask_ending` says no.
    A cancellation is a failure like any other: if it was ours, nobody reads the result. Environment and sandbox
    are opened before the workflow runs, and closed after the judge.
    """
    async with AsyncExitStack() as closing:
        if environment is not None:
            closing.callback(environment.close)
        if sandbox is not None:
            closing.push_async_callback(sandbox.close)
        started = time.perf_counter()
        result, output = WorkflowResult(), None
        spans = EmittedSpans()
        try:
            output = await _execute(result, workflow_class, workflow_task, open_tuner, environment, sandbox, spans)
            result.finished = True
            _check_output(output, workflow_class)
            result.is_success = _is_success(output.is_success)
            result.metadata = _mapping(output.metadata, "metadata")
            result.log_metrics = _mapping(output.log_metrics, "log_metrics")
            result.reward = finite_rewards(output.reward)
            spans.give_reward(result)
        except WorkflowInterrupted:
            raise
        except UnusableResultError as error:  # the agent's doing, which no workflow need foresee
            result.finished, result.reward, result.is_success = True, 0.0, False
            result.metadata = {"unusable_result": str(error)}
        except JudgeFault as error:  # of a workflow that has others play and judge: the agent is not to blame
            _blame(result, "judge", error)
            result.finished = True
        except BaseException as error:  # noqa: BLE001 - what user code raises, even sys.exit, ends only its episode
            _blame(result, "output" if result.finished or isinstance(error, RewardError) else "workflow", error)
            result.finished = False
        result.workflow_s = time.perf_counter() - started
        try:
            with spans.recorded():
                await judge_result(result, judge_, workflow_task, output, judge_retries, ask_ending, on_judge)
        finally:
            spans.end()
        return result


async def judge_result(
    result: WorkflowResult,
    judge_: BaseJudge | None,
    workflow_task: WorkflowTask,
    output: WorkflowOutput | None,
    retries: int,
    ask_ending: AskEnding | None = None,
    on_judge: Callable[[], None] = lambda: None,
) -> None:
    """Ask the judge if the workflow gave no reward, and note what it says. `output`: the workflow's, if it finished."""
    if judge_ is None or result.reward is not None or result.debugger_quit or result.failed_in == "judge":
        return
    started = time.perf_counter()
    if output is not None and result.finished:
        on_judge()
        await _judge(result, judge_, workflow_task, output, retries)
    elif ask_ending is None or result.failed_in == "output":
        return
    elif (early := await ask_ending(result.explained)) is not None:
        on_judge()
        await _judge_early(result, judge_, workflow_task, early, retries)
    else:
        return
    result.judge_s = time.perf_counter() - started


async def _execute(
    result: WorkflowResult,
    workflow_class: type[Workflow],
    workflow_task: WorkflowTask,
    open_tuner: OpenTuner,
    environment: LeasedEnvironment | None,
    sandbox: LeasedSandbox | None,
    spans: EmittedSpans,
) -> WorkflowOutput:
    workflow = workflow_class(name=workflow_class.__name__)
    if isinstance(targets := workflow.trainable_targets, str):  # whose letters would be targets
        raise TypeError(f"{workflow.name}.trainable_targets is {targets!r}, not a list: write [{targets!r}]")
    tuner = await open_tuner(targets)
    spans.begin(tuner, workflow_task)
    workflow_task.remember_tuner(tuner)
    if workflow_task.prompts is not None:
        result.prompts_used = []
        tuner.use_prompts(workflow_task.prompts, result.prompts_used)
    if sandbox is not None:
        await sandbox.open(tuner)
    if environment is not None:
        enter(environment, workflow_task)
    with spans.recorded():
        output: WorkflowOutput = await called(workflow.execute, workflow_task, tuner)
    return output


def _check_output(output: object, workflow_class: type[Workflow]) -> None:
    if not isinstance(output, WorkflowOutput):
        raise WorkflowFault(
            f"{workflow_class.__name__}.execute returned {shown(output)} of type {type(output).__name__}, "
            "not a WorkflowOutput: write `return WorkflowOutput(reward=…)`"
        )


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """What user code returns. A plain function is called while no event loop is running, so that it may start one."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    value = await call_off_loop(lambda: function(*arguments))
    return await value if inspect.isawaitable(value) else value


async def _judge(
    result: WorkflowResult, judge_: BaseJudge, workflow_task: WorkflowTask, output: WorkflowOutput, retries: int
) -> None:
    try:
        judgement = await _ask(judge_, workflow_task, output, retries, logging.WARNING)
    except WorkflowInterrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - user code, as above
        _blame(result, "judge", error)
    else:
        said = result.is_success
        _note(result, judgement)
        result.is_success = result.is_success if said is None else said


async def _judge_early(
    result: WorkflowResult, judge_: BaseJudge, workflow_task: WorkflowTask, early: EarlyEnding, retries: int
) -> None:
    """A judge that needs what the workflow would have returned may raise here: that is no fault of its own, unless its
    helper model or environment failed."""
    try:
        judgement = await _ask(judge_, workflow_task, early.output(), retries, logging.DEBUG)
    except WorkflowInterrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - user code, as above
        if _asked_in_vain(error):
            _blame(result, "judge", error)
            result.finished = True
        else:
            result.unjudged, result.debugger_quit = describe(error), _quits(error)
    else:
        _note(result, judgement)
        if result.later is not None:
            result.judged = early.output().metadata


def _asked_in_vain(error: BaseException) -> bool:
    """Whether a judge failed because what it asks did: that says nothing about the episode, which nothing then pays."""
    helper = any(isinstance(link, HelperError | HelperBudgetError) for link in error_chain(error))
    return helper or _environment_error(error) == "unavailable"


def _note(result: WorkflowResult, judgement: Judgement | Later) -> None:
    if isinstance(judgement, Later):
        result.later, result.reward = judgement, 0.0
        return
    result.reward, result.is_success = judgement.reward, judgement.is_success
    result.reward_parts, result.reward_weights = judgement.parts, judgement.weights
    if judgement.notes:
        result.metadata = {**result.metadata, "judge": judgement.notes}


async def _ask(
    judge_: BaseJudge, workflow_task: WorkflowTask, output: WorkflowOutput, retries: int, level: int
) -> Judgement | Later:
    async def ask() -> Judgement | Later:
        value = await called(judge_.compute_reward, workflow_task, output)
        return value if isinstance(value, Later) else validate_reward(value, type(judge_).__name__)

    try:
        return await asked_again(ask, retries, level)
    except UnusableResultError as error:  # the agent's doing, which no judge need foresee
        return Judgement(0.0, False, notes={"unusable_result": str(error)})


async def asked_again(ask: Callable[[], Awaitable[T]], retries: int, level: int = logging.WARNING) -> T:
    """What a judge says. Judging again costs no model calls: a judge that raised is asked again, unless its answer was
    invalid, or what it said is for the user; a sandbox that could not be made may be made the next time."""
    for attempt in range(retries + 1):
        try:
            return await ask()
        except (WorkflowInterrupted, UnusableResultError, JudgeFault, bdb.BdbQuit):
            raise
        except BaseException as error:
            final = isinstance(error, UserError) and not isinstance(error, SandboxError)
            if attempt == retries or final or _being_cancelled():
                raise
            log.log(level, "the judge raised %s: %s; asking it again", type(error).__name__, _said(error))
    raise AssertionError("unreachable")


def _being_cancelled() -> bool:
    """Has the episode been ended, other than by an error of its own?"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_success(value: Any) -> bool | None:
    success = scalar(value)
    if success is None or isinstance(success, bool):
        return success
    raise WorkflowFault(f"the workflow's is_success must be true, false or None, not {shown(value, 80)}")


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise WorkflowFault(f"the workflow's {name} must be a dictionary, not {shown(value, 80)}")
    copy: dict[str, Any] = plain(value)
    return copy


def _blame(result: WorkflowResult, where: Literal["workflow", "output", "judge"], error: BaseException) -> None:
    result.failed_in = where
    result.failure = describe(error)
    result.model_error = _model_error_code(error)
    result.environment_error = _environment_error(error)
    result.bug = not result.model_error and is_bug(error)
    result.debugger_quit = _quits(error)


def _environment_error(error: BaseException) -> Literal["", "fault", "unavailable"]:
    if any(isinstance(link, SandboxError) for link in error_chain(error)):
        return "unavailable"  # it could not be made, or it died
    faults = [link for link in error_chain(error) if isinstance(link, EnvironmentFault)]
    if any(isinstance(fault, EnvironmentUnavailableError) for fault in faults):
        return "unavailable"
    return "fault" if faults else ""


_OUR_FILES = (__file__, THREAD_CONTROL_FILE)


def describe(error: BaseException) -> Failure:
    """An exception as data. The traceback leaves out our own frames; an error that is ours throughout has none."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _OUR_FILES:
        frames = frames.tb_next
    message = _said(error)
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 - user code again: an error that can't be shown
        text = "".join(traceback.format_tb(frames)) + f"{type(error).__name__}: {message}\n"
    if isinstance(error, AjetError) and _is_ours_throughout(error):
        text = ""
    if len(text) > MOST_ERROR_CHARACTERS:
        half = MOST_ERROR_CHARACTERS // 2
        text = f"{text[:half]}\n… ({len(text)} characters)\n{text[-half:]}"
    # many clients' messages don't say which address failed; a call of our own model needs none
    address = "" if _model_error_code(error) else address_of(error)
    return Failure(type(error).__name__, f"{message} ({address})" if address not in message else message, text)


def _is_ours_throughout(error: BaseException) -> bool:
    """Whether neither a user's code nor a library was on the way to an error: then its message says it all."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return error.__cause__ is None and all(file.startswith(PACKAGE) for file in files)


def _said(error: BaseException) -> str:
    """An exception's message, whatever its class does to hinder that."""
    try:
        message = message_of(error)
    except Exception as worse:  # noqa: BLE001 - user code
        return f"(its message can't be shown: {type(worse).__name__})"
    long = len(message) > MOST_MESSAGE_CHARACTERS
    return f"{message[:MOST_MESSAGE_CHARACTERS]}… ({len(message)} characters)" if long else message


def _quits(error: BaseException) -> bool:
    return any(isinstance(link, bdb.BdbQuit) for link in error_chain(error))


def _codes(family: type[ModelCallError]) -> Iterator[str]:
    yield family.code
    for child in family.__subclasses__():
        yield from _codes(child)


_MODEL_ERROR_CODES = frozenset(_codes(ModelCallError))


def _model_error_code(error: BaseException) -> str:
    """The code of the failed model call that caused `error`: one of our errors, or a client library's with our code."""
    for link in error_chain(error):
        code = getattr(link, "code", None)
        if isinstance(code, str) and code in _MODEL_ERROR_CODES:
            return code
    return ""


CLIENT = "to ask the tuned model, write client = tuner.as_raw_openai_sdk_client(), or as_langchain_model()"
LOOP_RUNS = ("asyncio.run() cannot be called from a running event loop", "This event loop is already running")
OTHER_LOOP = ("is bound to a different event loop", "attached to a different loop")
NO_KEY = ("Missing credentials", "api_key client option must be set", "Could not resolve authentication method")
JSON_VALUES = (type(None), int, float, list, dict)
"""What a cut reply may be parsed to, or a search in it may find, where a whole reply gives something else."""
SHOWN = 80


def message_of(error: BaseException) -> str:
    """The message, with what to change. Of Pydantic's list of problems, the first with its field and reason."""
    said = _of_pydantic(error) if isinstance(error, ValidationError) else str(error) or repr(error)
    if isinstance(error, BaseExceptionGroup):
        member = next(_members(error))
        return f"{said}: {type(member).__name__}: {message_of(member)}"
    fix = fix_for(error)
    if not fix:
        return said
    first, newline, rest = said.partition("\n")
    return f"{first}: {fix}{newline}{rest}"


def fix_for(error: BaseException) -> str:
    """What to write instead, for mistakes that are often made in a workflow. Empty for any other error."""
    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False)
        if error.title == WorkflowOutput.__name__ and problems[0]["type"] == "extra_forbidden":
            return f"the fields are {', '.join(WorkflowOutput.model_fields)}"
        return "write `await` before the call" if any(inspect.isawaitable(each["input"]) for each in problems) else ""
    if other := written_for_another_agentscope(error):
        return other
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - user code: an error without a message
        return ""
    if isinstance(error, RuntimeError) and any(text in said for text in LOOP_RUNS):
        return "write `await …` instead, or a plain `def` without async"
    if isinstance(error, RuntimeError) and any(text in said for text in OTHER_LOOP):
        return (
            "episodes have an event loop each, and share a client or a library's cache of clients: make the client in "
            "`execute`, by the tuner if it has one, or set task_runner.wrapper_type: multi-processing"
        )
    refused = type(error).__name__ == "AuthenticationError" and address_of(error).startswith("https:")  # a provider
    return CLIENT if refused or any(text in said for text in NO_KEY) else ""


def is_bug(error: BaseException) -> bool:
    """Whether no reply of the model can have caused this, cut or not: a mistake in the code, or a service that is
    down."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_bug, _members(error)))
    if isinstance(error, NameError | ImportError | NotImplementedError) or fix_for(error):
        return True
    if isinstance(error, AttributeError):
        return not isinstance(error.obj, JSON_VALUES)
    return bool(address_of(error)) and any(_is_down(link) for link in error_chain(error) if hasattr(link, "request"))


def _members(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """The errors of a group, and of groups in it."""
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop()
        if isinstance(error, BaseExceptionGroup):
            waiting += reversed(error.exceptions)
        else:
            yield error


def _is_down(error: Any) -> bool:
    """Whether a client got no answer, or one that says that the server failed."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500


def _of_pydantic(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False)
    field = ".".join(map(str, (error.title, *first["loc"])))
    more = f" (and {len(others)} more)" if others else ""
    return f"{field}: {first['msg'].partition(', unable')[0]}, not {first['input']!r:.{SHOWN}}{more}"
