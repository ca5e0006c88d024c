"""What the YAML says about a search, as the parts take it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ajet.prompt_tuning.algorithm import ALGORITHMS, Algorithm, Sizes
from ajet.prompt_tuning.budget import Budget, Limits, Spent
from ajet.schema.errors import ConfigError, ImportPathError
from ajet.schema.user_code import load_symbol

if TYPE_CHECKING:
    from ajet.config import Config


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm that `ajet.prompt_tuning.algorithm` names. Raises a `UserError`."""
    tuning = config.ajet.prompt_tuning
    try:
        found = load_symbol(ALGORITHMS.get(tuning.algorithm, tuning.algorithm), config.base_dirs)
        algorithm = found(**_own_keys(config)) if isinstance(found, type) else found
    except ImportPathError as error:
        raise ImportPathError(f"ajet.prompt_tuning.algorithm: {error}") from error
    if not all(hasattr(algorithm, name) for name in ("rounds", "least_episodes", "run")):
        raise ImportPathError(
            f"ajet.prompt_tuning.algorithm: {tuning.algorithm} is no algorithm: it needs `rounds`, `least_episodes` "
            "and `run`, as in ajet/prompt_tuning/algorithm.py"
        )
    return algorithm if tuning.rounds is None else _with_rounds(algorithm, tuning.rounds)


def _own_keys(config: Config) -> dict[str, Any]:
    """The keys of a ready algorithm. One of the user's own is made without any."""
    tuning = config.ajet.prompt_tuning
    if tuning.algorithm == "apo":
        apo = tuning.apo
        return {
            "beam_width": apo.beam_width,
            "branch_factor": apo.branch_factor,
            "critique_batch": apo.critique_batch,
            "score_batch": apo.score_batch,
        }
    if tuning.algorithm == "gepa":
        gepa = tuning.gepa
        return {
            "minibatch": gepa.minibatch,
            "merges": gepa.merges,
            "selection": gepa.selection,
            "perfect_score": gepa.perfect_score,
            "in_turn": tuning.tune == "in_turn",
        }
    return {"proposals": tuning.best_of.proposals} if tuning.algorithm == "best_of" else {}


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
