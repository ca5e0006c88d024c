"""The programs of `docs/tracing.md`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ajet.observe.tracing import find_final_reward, get_rewards_from_span, record_spans
from support.pages import ROOT, blocks_of
from support.synthetic_run import write_experiment


def block(mark: str) -> str:
    (found,) = [one.code for one in blocks_of(ROOT / "docs" / "tracing.md") if mark in one.code]
    return found


def test_what_the_agent_emits() -> None:
    space: dict[str, Any] = {}
    exec(compile(block("@rollout"), "agent.py", "exec"), space)  # noqa: S102 - our own page
    with record_spans() as spans:
        asyncio.run(space["solver"]({"main_query": "6 * 7"}, None))
    assert [span.name.rpartition(".")[2] for span in spans] == [
        "operation",
        "message",
        "operation",
        "operation",
        "annotation",
    ]
    assert get_rewards_from_span(spans[-1]) == {"correct": 1.0, "brief": 1.0} and find_final_reward(spans) == 1.0


def test_what_can_be_made_of_a_run(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, steps=1, tasks=1, repeats=2) / "episodes.sqlite"
    space: dict[str, Any] = {"path": path}
    exec(compile(block("to_triplets(spans)"), "adapters.py", "exec"), space)  # noqa: S102 - our own page
    assert space["to_messages"](space["spans"])
