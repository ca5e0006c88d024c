"""What the YAML says about a search, as the parts take it: algorithm, proposer, budget and tasks."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ajet.config.kinds import PROMPT_OPTIMISERS, PROPOSERS, load
from ajet.observe.progress import Progress
from ajet.prompt_tuning.proposal import Proposer, ProposerError, Reply, Request
from ajet.prompt_tuning.search import Algorithm, Sizes
from ajet.prompt_tuning.trial import Budget, BudgetExhausted, Limits, Spent
from ajet.schema.errors import AjetError, ConfigError, ImportPathError
from ajet.schema.resources import read_prompts
from ajet.schema.task import Task
from ajet.schema.user_code import load_symbol
from ajet.task_judge.helper import HelperBudgetError, HelperError, HelperModel

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.task_runner.runtime import Runtime

log = logging.getLogger("ajet.backbone.prompt")


def make_proposer(config: Config, runtime: Runtime) -> Proposer:
    """The proposer that `ajet.prompt_tuning.proposer` names. Raises a `UserError`."""
    named = config.ajet.prompt_tuning.proposer
    if named in PROPOSERS:
        proposer: Proposer = load(PROPOSERS, named).from_config(config, runtime)
        return proposer
    return FunctionProposer(load_function(config))


def load_function(config: Config) -> Callable[[Request], Any]:
    named = config.ajet.prompt_tuning.proposer
    try:
        function = load_symbol(named, config.base_dirs)
    except ImportPathError as error:
        raise ImportPathError(f"ajet.prompt_tuning.proposer: {error}") from error
    if isinstance(function, type):
        function = function()
    if not callable(function):
        raise ImportPathError(f"ajet.prompt_tuning.proposer: {named} is not a function that takes a Request")
    return function  # type: ignore[no-any-return]


class HelperProposer:
    """The model of `ajet.helper`, within its budget."""

    @classmethod
    def from_config(cls, config: Config, runtime: Runtime) -> HelperProposer:
        tuning = config.ajet.prompt_tuning
        return cls(HelperModel.from_config(config), tuning.proposer_temperature, tuning.proposer_timeout)

    def __init__(self, helper: HelperModel, temperature: float, timeout_s: float) -> None:
        self._helper, self._temperature, self._timeout_s = helper, temperature, timeout_s
        self._counted = (0, 0)

    async def __call__(self, request: Request) -> Reply:
        try:
            text = await self._helper.complete(request.messages, temperature=self._temperature, timeout=self._timeout_s)
        except HelperBudgetError as error:
            raise BudgetExhausted(str(error)) from error
        except HelperError as error:
            raise ProposerError(str(error)) from error
        return Reply(text, *self._new_tokens())

    def _new_tokens(self) -> tuple[int, int]:
        """What all calls since the last look have used: calls in flight at once can't be told apart."""
        total = (self._helper.budget.input_tokens, self._helper.budget.output_tokens)
        new = (total[0] - self._counted[0], total[1] - self._counted[1])
        self._counted = total
        return new


class TunedProposer:
    """The model that the episodes use, through the same engine. Its calls are no episodes, and never trained."""

    @classmethod
    def from_config(cls, config: Config, runtime: Runtime) -> TunedProposer:
        return cls(runtime, config.ajet.rollout.max_model_len, config.ajet.prompt_tuning.proposer_temperature)

    def __init__(self, runtime: Runtime, max_model_len: int, temperature: float) -> None:
        self._runtime, self._max_model_len, self._temperature = runtime, max_model_len, temperature

    async def __call__(self, request: Request) -> Reply:
        model = self._runtime.model()  # episodes have run: it is loaded
        session = model.open_conversation(self._max_model_len)
        try:
            ask = self._runtime.tuner(session).as_model_function()
            message = await ask(request.messages, temperature=self._temperature, seed=request.draw)
        except Exception as error:
            if not isinstance(error, AjetError) and not type(error).__module__.startswith(("openai", "httpx")):
                raise
            raise ProposerError(f"the tuned model: {type(error).__name__}: {error}") from error
        finally:
            session.revoke()
        return Reply(str(message.get("content") or ""), *session.tracker.tree.spent)


class FunctionProposer:
    """A function of the user's: gets a `Request`, returns text. One that blocks runs in a thread of its own."""

    def __init__(self, function: Callable[[Request], Any]) -> None:
        self._function = function
        called: Any = function if inspect.isroutine(function) else type(function).__call__
        self._blocking = not inspect.iscoroutinefunction(called)

    async def __call__(self, request: Request) -> Reply:
        try:
            reply = await (self._in_thread(request) if self._blocking else self._function(request))
        except (Exception, SystemExit) as error:
            raise ProposerError(f"{_name(self._function)} raised {type(error).__name__}: {error}") from error
        if not isinstance(reply, str):
            raise ProposerError(f"{_name(self._function)} returned {type(reply).__name__}, not text")
        return Reply(reply)

    async def _in_thread(self, request: Request) -> Any:
        """Ask in a new thread: one that never returns would keep what uses the loop's few threads waiting."""
        context, answer = contextvars.copy_context(), Future[Any]()
        answer.set_running_or_notify_cancel()  # whoever waits may stop waiting

        def main() -> None:
            try:
                answer.set_result(context.run(self._function, request))
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited, as an error that asyncio takes
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                answer.set_exception(error if plain else RuntimeError(f"{type(error).__name__}: {error}"))

        threading.Thread(target=main, name="ajet-proposer", daemon=True).start()
        return await asyncio.wrap_future(answer)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class PatientProposer:
    """Asks another proposer, and gives each question a deadline."""

    def __init__(self, proposer: Proposer, timeout_s: float, progress: Progress) -> None:
        self._proposer, self._timeout_s, self._progress = proposer, timeout_s, progress
        self._waiting = 0

    async def __call__(self, request: Request) -> Reply:
        self._waiting += 1
        if self._waiting == 1:
            self._progress.phase("proposals")
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await self._proposer(request)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise ProposerError(
                f"no answer within {self._timeout_s:g} s (ajet.prompt_tuning.proposer_timeout)"
            ) from None
        finally:
            self._waiting -= 1


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm that `ajet.prompt_tuning.algorithm` names. Raises a `UserError`."""
    tuning = config.ajet.prompt_tuning
    try:
        found = load_symbol(PROMPT_OPTIMISERS.get(tuning.algorithm, tuning.algorithm), config.base_dirs)
        algorithm = found(**_own_keys(config)) if isinstance(found, type) else found
    except ImportPathError as error:
        raise ImportPathError(f"ajet.prompt_tuning.algorithm: {error}") from error
    if not all(hasattr(algorithm, name) for name in ("rounds", "least_episodes", "run")):
        raise ImportPathError(
            f"ajet.prompt_tuning.algorithm: {tuning.algorithm} is not an algorithm: it needs `rounds`, "
            "`least_episodes` and `run`, as in ajet/prompt_tuning/search.py"
        )
    return algorithm if tuning.rounds is None else _with_rounds(algorithm, tuning.rounds)


def _own_keys(config: Config) -> dict[str, Any]:
    """The keys of a ready algorithm. One of the user's own is made without any."""
    tuning = config.ajet.prompt_tuning
    sections = {"apo": tuning.apo, "gepa": tuning.gepa, "best_of": tuning.best_of}
    if tuning.algorithm not in sections:
        return {}
    keys = sections[tuning.algorithm].model_dump()
    return keys | {"in_turn": tuning.tune == "in_turn"} if tuning.algorithm == "gepa" else keys


def _with_rounds(algorithm: Any, rounds: int) -> Algorithm:
    if hasattr(algorithm, "__dataclass_fields__"):
        return replace(algorithm, rounds=rounds)  # type: ignore[no-any-return]
    algorithm.rounds = rounds
    return algorithm  # type: ignore[no-any-return]


def make_budget(config: Config, confirmation: int, spent: Spent | None = None) -> Budget:
    """`confirmation`: tasks on which two candidates are compared at the end."""
    budget, helper = config.ajet.prompt_tuning.budget, config.ajet.helper
    limits = Limits(
        episodes=budget.episodes,
        tokens=budget.tokens,
        money=budget.money,
        seconds=budget.seconds,
        reserved=2 * confirmation * config.ajet.prompt_tuning.repeats if budget.episodes is not None else 0,
    )
    ours = (budget.price_per_million.input, budget.price_per_million.output)
    helpers = (helper.price_per_million.input, helper.price_per_million.output)
    named = config.ajet.prompt_tuning.proposer
    theirs = {"helper": helpers, "tuned": ours}.get(named, (0.0, 0.0))
    return Budget(limits, prices=ours, proposer_prices=theirs, spent=spent)


def check_budget(config: Config, algorithm: Algorithm, sizes: Sizes, confirmation: int) -> None:
    """Refuse a budget that doesn't allow one round. Raises ConfigError."""
    tuning = config.ajet.prompt_tuning
    limit = tuning.budget.episodes
    if limit is None:
        return
    least, kept = algorithm.least_episodes(sizes) * tuning.repeats, 2 * confirmation * tuning.repeats
    if least + kept > limit:
        raise ConfigError(
            f"ajet.prompt_tuning.budget.episodes: {limit} are too few for one round of {tuning.algorithm}: the start "
            f"and the first round take {least}, and the confirmation {kept}\n"
            f"    write at least {least + kept}, or lower confirmation_tasks, validation_tasks, or the batches of "
            f"prompt_tuning.{tuning.algorithm}"
        )


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """By a name that is unique in the run: the task's id."""

    search: dict[str, Task]
    validation: dict[str, Task]
    confirmation: dict[str, Task]

    @property
    def all(self) -> dict[str, Task]:
        return {**self.search, **self.validation, **self.confirmation}


def split_tasks(config: Config, training: Sequence[Task], validation: Sequence[Task]) -> TaskSplit:
    """Search with the training split; validate and confirm with the validation split. Without one, the training tasks
    are divided: half, a quarter, a quarter. Confirmation tasks that occur elsewhere are left out."""
    tuning = config.ajet.prompt_tuning
    shuffle = random.Random(config.ajet.task_reader.seed).shuffle
    searched, rest = list(training), list(validation)
    if not rest:
        shuffle(searched)
        half = (len(searched) + 1) // 2
        searched, rest = searched[:half], searched[half:]
    else:
        shuffle(rest)
    if not searched or not rest:
        raise ConfigError(
            f"ajet.task_reader: {len(training)} training and {len(validation)} validation tasks are too few: "
            "candidates are written from some tasks and compared on others, so at least 2 are needed"
        )
    kept = len(rest) // 2 if tuning.confirmation_tasks is None else tuning.confirmation_tasks
    if kept >= len(rest):
        raise ConfigError(
            f"ajet.prompt_tuning.confirmation_tasks: {kept} of {len(rest)} tasks would be kept, and none is left to "
            f"validate candidates: write at most {len(rest) - 1}"
        )
    validating, confirming = rest[: len(rest) - kept], rest[len(rest) - kept :]
    if tuning.validation_tasks is not None:
        validating = validating[: tuning.validation_tasks]
    seen = {_content(task) for task in (*searched, *validating)}
    unseen = [task for task in confirming if _content(task) not in seen]
    if len(unseen) < len(confirming):
        log.warning(
            "%d of %d confirmation tasks also occur among the others, and are left out",
            *(len(confirming) - len(unseen), len(confirming)),
        )
    names: set[str] = set()
    return TaskSplit(_named(searched, names), _named(validating, names), _named(unseen, names))


def _named(tasks: Sequence[Task], taken: set[str]) -> dict[str, Task]:
    named = {}
    for task in tasks:
        name, number = task.task_id, 1
        while name in taken:
            number += 1
            name = f"{task.task_id}~{number}"
        taken.add(name)
        named[name] = task
    return named


def _content(task: Task) -> str:
    return json.dumps([task.main_query, task.init_messages, task.metadata], sort_keys=True, default=str)


def search_lines(config: Config, training: Sequence[Task], validation: Sequence[Task]) -> Iterator[tuple[str, str]]:
    """Label and text. Raises the `UserError` with which the run would be refused."""
    tuning = config.ajet.prompt_tuning
    prompts = read_prompts(tuning.templates)
    algorithm = make_algorithm(config)
    if "->" in tuning.proposer:
        load_function(config)
    split = split_tasks(config, training, validation)
    sizes = Sizes(len(split.search), len(split.validation))
    check_budget(config, algorithm, sizes, len(split.confirmation))
    for name, template in prompts.templates.items():
        filled = ", ".join(sorted(template.placeholders)) or "none"
        yield "template", f"{name}: {len(template.template):,} characters, placeholders: {filled}"
    yield "search", f"{tuning.algorithm}, at most {algorithm.rounds} rounds; proposals by {_proposer(config)}"
    counts = f"{sizes.search} to search with, {sizes.validation} to validate, {len(split.confirmation)} to confirm"
    yield "tasks", f"{counts} (seen by no candidate before the end)"
    least = algorithm.least_episodes(sizes) * tuning.repeats
    limits = [
        f"{value:,} {name}" for name in ("episodes", "tokens", "money", "seconds") if (value := tuning.budget[name])
    ]
    yield "episodes", f"{least:,} for the start and the first round at least; budget: {', '.join(limits) or 'no limit'}"


def _proposer(config: Config) -> str:
    named = config.ajet.prompt_tuning.proposer
    return f"the helper model {config.ajet.helper.model}" if named == "helper" else named.rpartition("/")[2]
