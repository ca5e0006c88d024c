"""Keys that existing files carry and that mean less here than they did: accepted, and said once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ajet.config.root import AjetConfig

IGNORED_BLOCKS = ("hydra", "defaults")


def notes(ajet: AjetConfig, tree: dict[str, Any]) -> Iterator[str]:
    """One line for each thing that is accepted but has no effect."""
    ignored = [f"`{name}:`" for name in IGNORED_BLOCKS if name in tree]
    if ignored:
        yield f"ignoring {' and '.join(ignored)}: the config is complete without"
    tracker = ajet.context_tracker
    policy = tracker.timeline_merging_policy
    less_exact = [
        f"{name}: {str(value).lower()}"
        for name, value, is_less in (
            ("timeline_compare_level", policy.timeline_compare_level, policy.timeline_compare_level == "text"),
            ("ignore_tools", policy.ignore_tools, policy.ignore_tools),
            ("fix_retokenization_drift", tracker.fix_retokenization_drift, not tracker.fix_retokenization_drift),
        )
        if is_less
    ]
    if less_exact:
        yield f"context_tracker: {', '.join(less_exact)} has no effect: merging here is always exact, token by token"
    if "interchange" in ajet.model_fields_set or ajet.model_fields_set & {
        "enable_experimental_interchange_server",
        "interchange_server",
    }:
        yield "ignoring the interchange settings: the gateway (`ajet.gateway`) is always available"
    if ajet.rollout.mode is not None:
        yield f"ignoring rollout.mode: {ajet.rollout.mode}: model calls are always asynchronous here"
    if ajet.task_runner.llm_infer_submit_method is not None:
        yield "ignoring task_runner.llm_infer_submit_method: model calls are always asynchronous here"
    if ajet.judge:
        yield "ignoring ajet.judge: the judge is set in ajet.task_judge"
    if ajet.task_reader.feedback_tracing:
        yield "ignoring task_reader.feedback_tracing: it is not part of this version"
    val = ajet.rollout.val_kwargs
    if not val.do_sample and val.temperature > 0:
        yield f"val_kwargs.do_sample is false: validation is greedy, its temperature {val.temperature:g} has no effect"
