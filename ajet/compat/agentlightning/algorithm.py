"""Algorithms: what `Trainer` does with its tasks. Each says which of our keys it stands for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from ajet.cli.migrate import Migration, verl
from ajet.schema.errors import ConfigError, UserError

log = logging.getLogger("ajet.compat")
T = TypeVar("T")
OURS_ALONE = "agentlightning"
"""A block of settings for parts of the library that have no counterpart here."""
GIVEN_OTHERWISE = ("backbone", "task_reader.", "rollout.engine")
"""Keys that `Trainer` and the backbone decide."""


class Baseline:
    """Each task once, and nothing is tuned. What a trainer without an algorithm does."""


class VERL:
    """Train the weights. `config` holds verl's keys; `backbone`: `verl`, `local` or `trinity` (default: `verl` if it is
    installed, else `local`)."""

    def __init__(self, config: Mapping[str, Any], *, backbone: str | None = None) -> None:
        self.backbone = backbone or ("verl" if find_spec("verl") else "local")
        done = Migration.of(verl.SYSTEM, {name: block for name, block in config.items() if name != OURS_ALONE})
        for line in done.lines:
            if line.why:
                log.info("VERL: %s is left out: %s", line.key, line.why)
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
