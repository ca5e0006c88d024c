"""Who answers a search's questions: the helper model, the tuned model itself, or a function of the user's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ajet.config.kinds import PROPOSERS, load
from ajet.prompt_tuning.budget import BudgetExhausted
from ajet.prompt_tuning.candidate import ProposerError
from ajet.prompt_tuning.proposal import Proposer, Reply, Request
from ajet.schema.errors import AjetError, ImportPathError
from ajet.schema.user_code import load_symbol
from ajet.task_judge.helper import HelperBudgetError, HelperError, HelperModel

if TYPE_CHECKING:
    from ajet.config import Config
    from ajet.task_runner.runtime import Runtime


def make_proposer(config: Config, runtime: Runtime) -> Proposer:
    """The proposer that `ajet.prompt_tuning.proposer` names. Raises a `UserError`."""
    named = config.ajet.prompt_tuning.proposer
    if named in PROPOSERS:
        proposer: Proposer = load(PROPOSERS, named).from_config(config, runtime)
        return proposer
    return FunctionProposer(load_function(config))


def load_function(config: Config) -> Callable[[Request], Any]:
    """The user's function. Raises ImportPathError."""
    named = config.ajet.prompt_tuning.proposer
    try:
        function = load_symbol(named, config.base_dirs)
    except ImportPathError as error:
        raise ImportPathError(f"ajet.prompt_tuning.proposer: {error}") from error
    if isinstance(function, type):
        function = function()
    if not callable(function):
        raise ImportPathError(f"ajet.prompt_tuning.proposer: {named} is no function that takes a Request")
    return function  # type: ignore[no-any-return]


class HelperProposer:
    """The model of `ajet.helper`, within its budget."""

    @classmethod
    def from_config(cls, config: Config, runtime: Runtime) -> HelperProposer:
        """Read `ajet.helper`."""
        return cls(HelperModel.from_config(config), config.ajet.prompt_tuning.proposer_temperature)

    def __init__(self, helper: HelperModel, temperature: float) -> None:
        self._helper, self._temperature = helper, temperature
        self._counted = (0, 0)

    async def __call__(self, request: Request) -> Reply:
        try:
            text = await self._helper.complete(request.messages, temperature=self._temperature)
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
        """Ask the run's own engine."""
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
    """A function of the user's: gets a `Request`, returns text. One that blocks runs in a thread."""

    def __init__(self, function: Callable[[Request], Any]) -> None:
        self._function = function
        called: Any = function if inspect.isroutine(function) else type(function).__call__
        self._blocking = not inspect.iscoroutinefunction(called)

    async def __call__(self, request: Request) -> Reply:
        try:
            reply = await (asyncio.to_thread(self._function, request) if self._blocking else self._function(request))
        except Exception as error:
            raise ProposerError(f"{_name(self._function)} raised {type(error).__name__}: {error}") from error
        if not isinstance(reply, str):
            raise ProposerError(f"{_name(self._function)} returned {type(reply).__name__}, not text")
        return Reply(reply)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
