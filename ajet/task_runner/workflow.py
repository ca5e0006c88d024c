"""`Workflow`: the class that users subclass to define how an agent works on one task.

`@rollout` makes one of a plain function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from ajet.schema.errors import RewardError, UserError
from ajet.schema.resources import LLM, PromptTemplate
from ajet.schema.task import WorkflowOutput, WorkflowTask, scalar

if TYPE_CHECKING:
    from ajet.task_runner.tuner import AjetTuner


class Workflow(BaseModel):
    """How an agent works on one task. Each episode runs a fresh instance `cls(name=…)`, so fields may hold state."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    name: str = ""
    trainable_targets: list[str] | None = None
    """Which `target_tag`s are trained; the others are answered by the helper model. None or []: all are trained."""

    def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput | Awaitable[WorkflowOutput]:
        """Work on the task with models from `tuner`, and return the result.

        `async def` or plain `def`: a plain one is called while no event loop is running in its thread, so that it may
        start one itself (`asyncio.run`). Blocking calls are fine in both: each episode has its own thread or process.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `async def execute(self, workflow_task, tuner)`")

    def model_post_init(self, _context: Any) -> None:
        if not self.name:
            self.name = type(self).__name__


RECORD_KEY = "_record"
"""In the metadata of tasks made from a Python data set: True if the record is the metadata itself, else the record."""


class RolloutFunctionError(UserError):
    """A function that can't be a workflow."""


@dataclass(frozen=True, slots=True)
class RolloutInfo:
    """Which episode this is: the parameter `rollout`."""

    rollout_id: str
    mode: str
    """`train` or `val`."""
    input: Any
    repeat: int
    """Which of the task's episodes (0 … num_repeat-1)."""


def record_of(workflow_task: WorkflowTask) -> Any:
    """The task as the data set gave it; for a task file: its record, as a dict."""
    task = workflow_task.task
    record = task.metadata.get(RECORD_KEY)
    metadata = {name: value for name, value in task.metadata.items() if name != RECORD_KEY}
    if record is True:
        return metadata
    if RECORD_KEY in task.metadata:
        return record
    named = {"task_id": task.task_id, "main_query": task.main_query}
    return {**named, **({"init_messages": task.init_messages} if task.init_messages else {}), **metadata}


def _llm(_: WorkflowTask, tuner: AjetTuner) -> LLM:
    endpoint = tuner.as_oai_baseurl_apikey()
    return LLM(endpoint.base_url, endpoint.model, endpoint.api_key)


def _info(workflow_task: WorkflowTask, _: AjetTuner) -> RolloutInfo:
    return RolloutInfo(
        rollout_id=workflow_task.episode_uuid,
        mode="val" if workflow_task.validation else "train",
        input=record_of(workflow_task),
        repeat=workflow_task.task_thread_index,
    )


def _only_prompt(_: WorkflowTask, tuner: AjetTuner) -> PromptTemplate:
    return tuner.prompt()


PARAMETERS: dict[str, Callable[[WorkflowTask, AjetTuner], Any]] = {
    "task": lambda workflow_task, _: record_of(workflow_task),
    "llm": _llm,
    "model": lambda _, tuner: tuner.as_model_function(),
    "prompt_template": _only_prompt,
    "rollout": _info,
    "tuner": lambda _, tuner: tuner,
    "workflow_task": lambda workflow_task, _: workflow_task,
}
"""What each parameter is given. A function takes those that it names, in any order."""


class RolloutFunction:
    """What `@rollout` makes of a function: callable as before, and a workflow through `__ajet_class__`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.parameters = _parameters(function)
        self.__ajet_class__: type[Workflow] = _workflow_class(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def bind(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> Any:
        """Call the function for one episode; a coroutine if it is `async`."""
        return self._function(**{name: PARAMETERS[name](workflow_task, tuner) for name in self.parameters})


def rollout(function: Callable[..., Any]) -> RolloutFunction:
    """Make a function a workflow: for `Trainer`, and for `user_workflow: agent.py->solver`."""
    return RolloutFunction(function)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    name = getattr(function, "__name__", repr(function))
    if not callable(function) or isinstance(function, type):
        raise RolloutFunctionError(f"@rollout takes a function, not {name}")
    names = []
    for parameter in inspect.signature(function).parameters.values():
        positional_only = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        if parameter.name in PARAMETERS and not positional_only:
            names.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise RolloutFunctionError(
                f"@rollout: {name} has a parameter {parameter.name!r}, which nothing fills\n"
                f"    parameters have these names: {', '.join(PARAMETERS)}; others need a default"
            )
    return tuple(names)


def _workflow_class(rollout_function: RolloutFunction) -> type[Workflow]:
    """A function with `async def` gets an `execute` with `async def`; any other runs in a thread without a loop, and
    may return a coroutine, as decorated ones do."""
    name = getattr(rollout_function, "__name__", "function")

    async def output(returned: Awaitable[Any]) -> WorkflowOutput:
        return output_of(name, await returned)

    async def execute_async(_: Workflow, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        return await output(rollout_function.bind(workflow_task, tuner))

    def execute_sync(_: Workflow, workflow_task: WorkflowTask, tuner: AjetTuner) -> Any:
        returned = rollout_function.bind(workflow_task, tuner)
        return output(returned) if inspect.isawaitable(returned) else output_of(name, returned)

    execute = execute_async if inspect.iscoroutinefunction(rollout_function._function) else execute_sync
    doc = inspect.getdoc(rollout_function._function)
    return type(name, (Workflow,), {"execute": execute, "__doc__": doc, "__module__": rollout_function.__module__})


def output_of(name: str, returned: Any) -> WorkflowOutput:
    if isinstance(returned, WorkflowOutput):
        return returned
    returned = scalar(returned)
    if isinstance(returned, bool):
        return WorkflowOutput(reward=float(returned), is_success=returned)
    if returned is None or isinstance(returned, int | float | list) or hasattr(returned, "__float__"):
        return WorkflowOutput.model_construct(reward=returned)  # checked where all rewards enter
    raise RewardError(
        f"{name} returned {returned!r:.200} of type {type(returned).__name__}: "
        "return the reward (a number, or one number per model call), a WorkflowOutput, or None for the judge"
    )
