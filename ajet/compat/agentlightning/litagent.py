"""Agents: functions with `@rollout`, and classes derived from `LitAgent`."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ajet.compat.agentlightning.store import AttemptedRollout
from ajet.schema.errors import UserError
from ajet.schema.resources import LLM, PromptTemplate
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.store.records import Attempt, AttemptStatus, Mode, Rollout, RolloutStatus
from ajet.task_runner.results import called
from ajet.task_runner.workflow import RolloutFunction, RolloutFunctionError, Workflow, output_of, record_of
from ajet.task_runner.workflow import rollout as rollout

if TYPE_CHECKING:
    from ajet.task_runner.tuner import AjetTuner

log = logging.getLogger(__name__)
T = TypeVar("T")
Resources = Mapping[str, Any]


class MissingResourceError(UserError, ValueError):
    """An agent takes a resource that it was not given."""


class AgentSignatureError(RolloutFunctionError, ValueError):
    """`@llm_rollout` or `@prompt_rollout` on a function that doesn't take what it is named after."""


class Hook:
    """Callbacks around an agent's execution. All arguments are keywords; exceptions are logged."""

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None: ...

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None: ...

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None: ...

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None: ...


class LitAgent(Generic[T]):
    """Override `rollout`, or `training_rollout` and `validation_rollout`, or their twins that end in `_async`."""

    def rollout(self, task: T, resources: Resources, rollout: Any) -> Any:
        raise UserError(f"{type(self).__name__} overrides neither `rollout` nor any of its variants")

    def training_rollout(self, task: T, resources: Resources, rollout: Any) -> Any:
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: Resources, rollout: Any) -> Any:
        return self.rollout(task, resources, rollout)

    async def rollout_async(self, task: T, resources: Resources, rollout: Any) -> Any:
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: Resources, rollout: Any) -> Any:
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: Resources, rollout: Any) -> Any:
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Whether any of the coroutines is overridden: then all modes use them."""
        names = ("rollout_async", "training_rollout_async", "validation_rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in names)

    def method(self, mode: str | None) -> Callable[..., Any]:
        """What is called in this mode. All but `train` validate."""
        name = "training_rollout" if mode == "train" else "validation_rollout"
        found: Callable[..., Any] = getattr(self, f"{name}_async" if self.is_async() else name)
        return found


Agent = LitAgent[Any] | RolloutFunction


def llm_rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """`@rollout` for a function that takes `llm`."""
    return _needing("llm", function)


def prompt_rollout(function: Callable[..., Any] | None = None) -> Any:
    """`@rollout` for a function that takes `prompt_template`."""
    return _needing("prompt_template", function)


def _needing(name: str, function: Callable[..., Any] | None) -> Any:
    def made(function: Callable[..., Any]) -> RolloutFunction:
        agent = rollout(function)
        if name not in agent.parameters:
            raise AgentSignatureError(f"{function.__name__} has no parameter {name!r}")
        return agent

    return made if function is None else made(function)


def as_agent(agent: Any) -> Agent:
    """Return the argument as an agent. Raises UserError if it isn't one."""
    if isinstance(agent, LitAgent | RolloutFunction):
        return agent
    if inspect.isfunction(agent):
        return rollout(agent)
    raise UserError(f"{agent!r:.100} is not an agent: pass a function decorated with @rollout, or a LitAgent")


def bound(agent: Agent, attempted: AttemptedRollout, resources: Resources) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what to call for a rollout of a store, and its arguments."""
    task = attempted.rollout.input
    if isinstance(agent, LitAgent):
        return agent.method(attempted.rollout.mode), {"task": task, "resources": resources, "rollout": attempted}
    values: dict[str, Any] = {"task": task, "rollout": attempted}
    for name in agent.parameters:
        if name in ("llm", "prompt_template"):
            values[name] = _first(resources, LLM if name == "llm" else PromptTemplate, name)
        elif name not in values:
            raise RolloutFunctionError(f"the parameter {name!r} is filled by a training run only, not from a store")
    return agent, {name: values[name] for name in agent.parameters}


def _first(resources: Resources, kind: type[Any], name: str) -> Any:
    """The first resource of a type, whatever its name."""
    found = [value for value in resources.values() if isinstance(value, kind)]
    if not found:
        raise MissingResourceError(
            f"the agent takes `{name}`, but there is no {kind.__name__} among the resources\n"
            f"    give one: Trainer(initial_resources={{'main': {kind.__name__}(…)}})"
        )
    if len(found) > 1:
        log.warning("%d resources are of type %s: the agent gets the first", len(found), kind.__name__)
    return found[0]


def workflow_of(agent: Agent) -> RolloutFunction | type[Workflow]:
    """The agent as a training run takes it."""
    if isinstance(agent, RolloutFunction):
        return agent

    async def execute(_: Workflow, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        endpoint = tuner.as_oai_baseurl_apikey()
        names = () if workflow_task.prompts is None else workflow_task.prompts.templates
        templates = {name: tuner.prompt(name) for name in names}
        resources = {"main_llm": LLM(endpoint.base_url, endpoint.model, endpoint.api_key), **templates}
        attempted = _as_attempt(workflow_task)
        returned = await called(agent.method(attempted.mode), attempted.input, resources, attempted)
        return output_of(type(agent).__name__, returned)

    kind = type(agent)
    return type(kind.__name__, (Workflow,), {"execute": execute, "__doc__": kind.__doc__, "__module__": __name__})


def _as_attempt(workflow_task: WorkflowTask) -> AttemptedRollout:
    """An episode of a run, as a store would tell of it."""
    episode, now = workflow_task.episode_uuid, time.time()
    mode: Mode = "val" if workflow_task.validation else "train"
    return AttemptedRollout(
        Rollout(
            rollout_id=episode,
            input=record_of(workflow_task),
            start_time=now,
            mode=mode,
            status=RolloutStatus.RUNNING,
        ),
        Attempt(rollout_id=episode, attempt_id=episode, sequence_id=1, start_time=now, status=AttemptStatus.RUNNING),
    )
