"""`Trainer`: an algorithm, an agent and its tasks; runners for a trainer without one. Each algorithm says which of our
keys it stands for."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from ajet.backbone.trainer_api import QUERY_FIELDS
from ajet.backbone.trainer_api import Trainer as OurTrainer
from ajet.cli.migrate import Migration, verl
from ajet.compat.agentlightning.runner import Agent, Hook, LitAgentRunner, as_agent, workflow_of
from ajet.compat.agentlightning.store import AttemptedRollout, InMemoryLightningStore, LightningStore
from ajet.compat.agentlightning.tracer import Tracer
from ajet.schema.errors import ConfigError, UserError
from ajet.schema.resources import PromptTemplate
from ajet.task_runner.workflow import RolloutFunction

log = logging.getLogger("ajet.compat")
T = TypeVar("T")
OURS_ALONE = "agentlightning"
"""A block of settings for parts of the library that have no counterpart here."""
GIVEN_OTHERWISE = ("backbone", "task_reader.type", "task_reader.huggingface_dat_repo.", "rollout.engine")
"""Keys that `Trainer` and the backbone decide."""


class Baseline:
    """Each task once, and nothing is tuned. What a trainer without an algorithm does."""


class VERL:
    """Train the weights. `config` holds verl's keys; `backbone`: `verl`, `local` or `trinity` (default: `verl` if it is
    installed, else `local`)."""

    def __init__(self, config: Mapping[str, Any], *, backbone: str | None = None) -> None:
        self.backbone = backbone or ("verl" if find_spec("verl") else "local")
        done = Migration.of(verl.SYSTEM, {name: block for name, block in config.items() if name != OURS_ALONE})
        left_out = [
            line
            for line in done.lines
            if line.what in ("dropped", "unknown") or (line.now.startswith("verl.") and self.backbone != "verl")
        ]
        for line in left_out:
            log.info("VERL: %s is left out: %s", line.key, line.why or "only verl reads it")
        if keys := [line.key for line in left_out] + [OURS_ALONE] * (OURS_ALONE in config):
            log.warning("VERL leaves out %s; setup_logging() shows why", ", ".join(keys))
        self.keys: dict[str, Any] = {
            f"+{key}" if key.startswith("verl.") else key: value
            for key, value in done.keys.items()
            if not key.startswith(GIVEN_OTHERWISE)
        }
        if "model.path" not in self.keys:
            raise ConfigError("VERL: the configuration names no model: set actor_rollout_ref.model.path")


class APO(Generic[T]):
    """Tune the prompt template, with `client` as the model that criticises and edits."""

    def __init__(
        self,
        async_openai_client: Any,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str | None = None,
        diversity_temperature: float = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        _poml_trace: bool = False,
    ) -> None:
        """One model criticises and edits: `apply_edit_model` has to be the same, or is left out. `_poml_trace` switched
        on what the library kept of its own prompts; here they are always kept, in the run's history."""
        if apply_edit_model not in (None, gradient_model):
            raise ConfigError(
                f"APO: gradient_model={gradient_model!r}, apply_edit_model={apply_edit_model!r}: one model does both\n"
                "    leave apply_edit_model out"
            )
        self.backbone = "prompt"
        self.keys: dict[str, Any] = {
            "helper.model": gradient_model,
            "helper.base_url": str(async_openai_client.base_url),
            "helper.api_key": async_openai_client.api_key,
            "prompt_tuning.algorithm": "apo",
            "prompt_tuning.proposer_temperature": diversity_temperature,
            "prompt_tuning.rounds": beam_rounds,
            "prompt_tuning.apo.beam_width": beam_width,
            "prompt_tuning.apo.branch_factor": branch_factor,
            "prompt_tuning.apo.critique_batch": gradient_batch_size,
            "prompt_tuning.apo.score_batch": val_batch_size,
        }


class FunctionalAlgorithm:
    """What `@algo` makes of a coroutine: a trainer runs it beside its runners, with what its parameters name."""

    GIVEN = ("store", "initial_resources", "train_dataset", "val_dataset")

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.function = function
        self.parameters = list(inspect.signature(function).parameters)
        if not inspect.iscoroutinefunction(function):
            raise AlgorithmError(f"@algo: {function.__name__} must be an `async def`")
        for name in self.parameters:
            if name not in self.GIVEN:
                raise AlgorithmError(
                    f"@algo: {function.__name__} takes {name!r}; an algorithm may take {', '.join(self.GIVEN)}"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return self.function(*args, **kwargs)


class AlgorithmError(UserError, ValueError):
    """`@algo` on a function that no trainer can call."""


algo = FunctionalAlgorithm
Algorithm = Baseline | VERL | APO[Any] | FunctionalAlgorithm


RUNNERS_WAIT_S = 0.2


class Trainer:
    """`Trainer(algorithm=VERL(config), n_runners=8).fit(agent, train, val_dataset=val)`."""

    def __init__(
        self,
        *,
        algorithm: Algorithm | None = None,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: Mapping[str, Any] | None = None,
        tracer: Tracer | None = None,
        store: LightningStore | None = None,
        hooks: Hook | Sequence[Hook] | None = None,
        dev: bool = False,
        n_workers: int | None = None,
        exp_dir: str = "saved_experiments",
        fresh: bool = False,
        config: Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> None:
        """`config`: further keys of ours. `adapter`: accepted, and not used: training reads the recorded calls.
        One that chooses agents is refused."""
        if unknown := parts.keys() - {"adapter"}:
            raise UserError(
                f"Trainer takes no {', '.join(sorted(unknown))}: there are no parts of that kind here; see "
                "docs/from_agent_lightning.md, or `config` for keys of ours"
            )
        algorithms = (Baseline, VERL, APO, FunctionalAlgorithm)
        asked: Any = ((algorithm, algorithms), (store, LightningStore), (tracer, Tracer))
        for part, kind in asked:
            if part is not None and not isinstance(part, kind):
                raise UserError(f"Trainer: {part!r:.80}: pass an object, not a class, a name or a dict")
        self.algorithm = Baseline() if algorithm is None or dev else algorithm
        self.n_runners = n_runners or n_workers or 1
        if self.n_runners < 1:
            raise UserError(f"Trainer: n_runners={self.n_runners}: at least one runner has to work")
        self.initial_resources = dict(initial_resources or {})
        self.store = store or InMemoryLightningStore()
        adapter = parts.get("adapter")
        agents = adapter.get("agent_match") if isinstance(adapter, Mapping) else getattr(adapter, "agent_match", None)
        self._only_with_runners = {"store": store, "hooks": hooks, "adapter.agent_match": agents}
        self._max_rollouts, self._tracer = max_rollouts, tracer
        self._hooks: Sequence[Hook] = [hooks] if isinstance(hooks, Hook) else hooks or ()
        self._exp_dir, self._fresh, self._config = exp_dir, fresh, dict(config or {})

    def fit(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None) -> Any:
        """Train: returns the run. Without an algorithm: the rollouts, each task having been executed once. With an
        `@algo`: what it returns."""
        found = as_agent(agent)
        if isinstance(self.algorithm, Baseline):
            return _finish(self._each_once(found, train_dataset, val_dataset))
        if self._max_rollouts is not None:
            raise UserError("max_rollouts: an algorithm says itself when it ends; only a trainer without one counts")
        if isinstance(self.algorithm, FunctionalAlgorithm):
            return _finish(self._own(self.algorithm, found, train_dataset, val_dataset))
        if in_vain := [name for name, value in self._only_with_runners.items() if value]:
            raise UserError(
                f"Trainer: {', '.join(in_vain)} would do nothing with {type(self.algorithm).__name__}: leave it out\n"
                "    episodes are in the run's folder; a Workflow's `trainable_targets` chooses the agents to train"
            )
        templates = {name: value for name, value in self.initial_resources.items() if isinstance(value, PromptTemplate)}
        trainer = OurTrainer(
            {**self.algorithm.keys, **self._config},
            backbone=self.algorithm.backbone,
            n_runners=self.n_runners,
            prompt_template=templates or None,
            exp_dir=self._exp_dir,
            fresh=self._fresh,
        )
        return trainer.fit(workflow_of(found), train_dataset, val_dataset=val_dataset)

    def dev(self, agent: Any, train_dataset: Any = None, *, val_dataset: Any = None) -> list[AttemptedRollout]:
        """Each task once; nothing is trained."""
        return _finish(self._each_once(as_agent(agent), train_dataset, val_dataset))

    async def _each_once(self, agent: Agent, train: Any, val: Any) -> list[AttemptedRollout]:
        tasks = [("train", task) for task in _items(train)] + [("val", task) for task in _items(val)]
        tasks = tasks[: self._max_rollouts]
        if not tasks:
            raise UserError("fit: there are no tasks: pass train_dataset=[…]")
        resources = self.initial_resources or _default_resources(agent, tasks[0][1])
        if resources:
            await self.store.add_resources(resources)
        queued = [(await self.store.enqueue_rollout(task, mode)).rollout_id for mode, task in tasks]  # type: ignore[arg-type]
        ended = await self._beside_runners(agent, self.store.wait_for_rollouts(rollout_ids=queued))
        return sorted(ended, key=lambda one: queued.index(one.rollout_id))

    async def _own(self, algorithm: FunctionalAlgorithm, agent: Agent, train: Any, val: Any) -> Any:
        given = {
            "store": self.store,
            "initial_resources": self.initial_resources,
            "train_dataset": train,
            "val_dataset": val,
        }
        for name in ("train_dataset", "val_dataset"):
            if given[name] is not None and name not in algorithm.parameters:
                raise TypeError(f"fit: {name} is given, and {algorithm.function.__name__} doesn't take it")
        if self.initial_resources:
            await self.store.add_resources(self.initial_resources)
        return await self._beside_runners(agent, algorithm(**{name: given[name] for name in algorithm.parameters}))

    async def _beside_runners(self, agent: Agent, work: Awaitable[T]) -> T:
        """Wait for this, while runners execute what is queued."""
        finished = asyncio.Event()
        runners = [asyncio.create_task(self._run(agent, number, finished)) for number in range(self.n_runners)]
        waiting = asyncio.ensure_future(work)
        try:
            await asyncio.wait([waiting, *runners], return_when=asyncio.FIRST_COMPLETED)
            finished.set()
            await asyncio.gather(*runners)
            return await waiting
        finally:
            for task in (waiting, *runners):
                task.cancel()

    async def _run(self, agent: Agent, number: int, finished: asyncio.Event) -> None:
        runner = LitAgentRunner[Any](self._tracer, poll_interval=RUNNERS_WAIT_S)
        with runner.run_context(agent=agent, store=self.store, hooks=self._hooks, worker_id=number):
            await runner.iter(event=finished)


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; in a notebook, whose own event loop is running, in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # not run here: what the work raises would be shown as a fault while this one was handled
    else:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, work).result()
    return asyncio.run(work)


def _items(dataset: Any) -> list[Any]:
    """A data set of the library has `__len__` and `__getitem__`."""
    if dataset is None:
        return []
    return [dataset[index] for index in range(len(dataset))] if hasattr(dataset, "__getitem__") else list(dataset)


def _default_resources(agent: Agent, task: Any) -> dict[str, Any]:
    """An agent that takes a prompt template, and was given none, gets one that holds the task's text."""
    if not isinstance(agent, RolloutFunction) or "prompt_template" not in agent.parameters:
        return {}
    names = [name for name in QUERY_FIELDS if isinstance(task, Mapping) and isinstance(task.get(name), str)]
    if not names:
        raise UserError(
            "fit: the agent takes prompt_template, and there is none\n"
            "    give one: Trainer(initial_resources={'main': PromptTemplate('… {question} …')})"
        )
    log.info("no prompt template was given: the agent gets {%s}", names[0])
    return {"prompt_template": PromptTemplate(f"{{{names[0]}}}")}
