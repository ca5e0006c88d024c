"""Settings that are fine one by one but can't be meant together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ajet.config.root import AjetConfig


class Contradiction(NamedTuple):
    """Which keys, what is wrong, and what to do."""

    keys: tuple[str, ...]
    """Under `ajet`, the ones to look at first coming first."""
    what: str
    fix: str


def contradictions(ajet: AjetConfig, backbone: str) -> Iterator[Contradiction]:
    """Everything that does not fit together."""
    for check in CHECKS:
        yield from check(ajet)
    if backbone != "debug":
        yield from _training(ajet)


def _lengths(ajet: AjetConfig) -> Iterator[Contradiction]:
    data, rollout = ajet.data, ajet.rollout
    total = data.max_prompt_length + data.max_response_length
    if total > rollout.max_model_len:
        yield Contradiction(
            ("rollout.max_model_len", "data.max_response_length", "data.max_prompt_length"),
            f"data.max_prompt_length ({data.max_prompt_length}) + data.max_response_length "
            f"({data.max_response_length}) = {total} is more than rollout.max_model_len ({rollout.max_model_len})",
            f"raise rollout.max_model_len to {total}, or lower one of the two lengths",
        )


def _groups(ajet: AjetConfig) -> Iterator[Contradiction]:
    rollout = ajet.rollout
    if rollout.min_group_size is not None and rollout.min_group_size > rollout.num_repeat:
        yield Contradiction(
            ("rollout.min_group_size", "rollout.num_repeat"),
            f"a group has num_repeat = {rollout.num_repeat} episodes and never reaches "
            f"min_group_size = {rollout.min_group_size}",
            f"lower min_group_size to {rollout.num_repeat} or less, or leave it out",
        )


def _steps(ajet: AjetConfig) -> Iterator[Contradiction]:
    turns = ajet.rollout.multi_turn
    if turns.expected_steps > turns.max_steps:
        yield Contradiction(
            ("rollout.multi_turn.expected_steps", "rollout.multi_turn.max_steps"),
            f"an episode may not take the expected_steps = {turns.expected_steps} it is expected to "
            f"(max_steps = {turns.max_steps})",
            "raise max_steps, or lower expected_steps",
        )


def _batches(ajet: AjetConfig) -> Iterator[Contradiction]:
    trainer, batch = ajet.trainer_common, ajet.data.train_batch_size
    if trainer.mini_batch_num > batch:
        yield Contradiction(
            ("trainer_common.mini_batch_num", "data.train_batch_size"),
            f"{batch} tasks a step (data.train_batch_size) can't be split into mini_batch_num = "
            f"{trainer.mini_batch_num} mini-batches",
            f"lower mini_batch_num to {batch} or less",
        )


def _rubric_scores(ajet: AjetConfig) -> Iterator[Contradiction]:
    rubrics = ajet.task_judge.rubrics_auto_grader
    if rubrics.min_score >= rubrics.max_score:
        yield Contradiction(
            ("task_judge.rubrics_auto_grader.min_score", "task_judge.rubrics_auto_grader.max_score"),
            f"min_score ({rubrics.min_score:g}) is not below max_score ({rubrics.max_score:g})",
            "swap them",
        )


def _rollout_engine(ajet: AjetConfig) -> Iterator[Contradiction]:
    rollout = ajet.rollout
    if rollout.deterministic and rollout.engine != "torch":
        yield Contradiction(
            ("rollout.deterministic", "rollout.engine"),
            f"only the embedded engine repeats bit for bit, and rollout.engine is {rollout.engine}",
            "set rollout.engine: torch, or leave deterministic out",
        )


def _helper(ajet: AjetConfig) -> Iterator[Contradiction]:
    helper = ajet.helper
    if helper.model is None and (helper.base_url is not None or helper.api_key is not None):
        yield Contradiction(
            ("helper.base_url", "helper.api_key"),
            "helper has an endpoint but no model, so nobody would talk to it",
            "set helper.model to the model's name at that endpoint",
        )
    if helper.max_cost is not None and helper.price_per_million.input == helper.price_per_million.output == 0:
        yield Contradiction(
            ("helper.max_cost", "helper.price_per_million"),
            "helper.max_cost needs prices: at a price of 0 every call is free",
            "set helper.price_per_million.input and .output to what a million tokens cost",
        )


def _training(ajet: AjetConfig) -> Iterator[Contradiction]:
    rollout, algorithm = ajet.rollout, ajet.trainer_common.algorithm
    if (
        algorithm.adv_estimator in ("grpo", "drgrpo", "rloo")
        and rollout.num_repeat < 2
        and algorithm.policy_loss != "sft"
    ):
        yield Contradiction(
            ("rollout.num_repeat", "trainer_common.algorithm.adv_estimator"),
            f"{algorithm.adv_estimator} compares the episodes of one task, and rollout.num_repeat is 1: "
            "nothing would be learnt",
            "set rollout.num_repeat to 2 or more, or adv_estimator: reinforce_plus_plus",
        )
    if rollout.engine == "remote":
        yield Contradiction(
            ("rollout.engine", "backbone"),
            "a remote endpoint's model can't be trained",
            "use --backbone=debug, or another rollout.engine",
        )
    if rollout.temperature == 0:
        yield Contradiction(
            ("rollout.temperature",),
            "with rollout.temperature 0 all episodes of a task are the same and nothing is learnt",
            "set a temperature above 0",
        )


CHECKS: tuple[Callable[[AjetConfig], Iterator[Contradiction]], ...] = (
    _lengths,
    _groups,
    _steps,
    _batches,
    _rubric_scores,
    _rollout_engine,
    _helper,
)
