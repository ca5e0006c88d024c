"""An episode by time: model calls, tools, environment steps and spans on one scale."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from pages_of_viewer import start
from playwright.sync_api import Page, expect
from synthetic_run import Vocabulary, math_episode

from ajet.config import Config
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.schema.episode import EnvironmentEvent, EnvironmentRecord, Episode
from ajet.schema.span import Span, SpanStatus
from ajet.viewer.timeline import timeline

BEGAN = 1_800_000_000.0
TORN = SpanStatus(status_code="ERROR", description="torn")


def _id(name: str) -> str:
    return name.replace(" ", "-")


def span(name: str, start: float | None, end: float | None, parent: str | None = None, **more: object) -> Span:
    times = {"start_time": None if start is None else BEGAN + start, "end_time": None if end is None else BEGAN + end}
    return Span(
        rollout_id="r", attempt_id="a", span_id=_id(name), name=name, parent_id=parent and _id(parent), **times, **more
    )  # type: ignore[arg-type]


def an_episode() -> Episode:
    episode = math_episode(Vocabulary(), random.Random(0), task=1)
    episode.began = BEGAN
    for index, call in enumerate(episode.tree.calls):
        call.started_s, call.seconds = float(index), 0.5
    events = [
        EnvironmentEvent("reset", 0.0, 0.25, observation="a board"),
        EnvironmentEvent("step", 0.5, 0.25, 1.0, True, "go left", "a wall", "it is broken"),
    ]
    episode.environment = EnvironmentRecord("world.py->World", events, left_out=3, began=BEGAN - 0.5)
    episode.spans = [
        span("search the shelf", 0.6, 0.9, attributes={"query": "apples"}),
        span("open a book", 0.7, 0.8, parent="search the shelf", status=TORN),
        span("ring", 0.7, None, parent="ring"),
        span("whenever", None, None),
    ]  # fmt: skip
    return episode


def test_all_kinds_are_on_one_scale() -> None:
    episode = an_episode()
    shown = timeline(episode)
    entries = {(entry["kind"], entry["label"]): entry for entry in shown["entries"]}
    starts = [entry["start"] for entry in shown["entries"] if entry["start"] is not None]
    assert starts == sorted(starts) and shown["left_out"] == 3
    assert entries["environment", "reset"]["start"] == -0.5, "it was asked for before the first call could be made"
    assert entries["environment", "step"]["start"] == 0.0 and entries["environment", "step"]["error"] == "it is broken"
    assert entries["environment", "step"]["facts"]["action"] == "go left"
    assert entries["span", "search the shelf"]["start"] == pytest.approx(0.6)
    assert entries["span", "open a book"]["depth"] == 1 and entries["span", "open a book"]["error"] == "torn"
    assert entries["span", "ring"]["depth"] == 0, "a ring of parents ends"
    assert shown["entries"][-1]["label"] == "whenever" and shown["entries"][-1]["start"] is None
    tools = entries["tools", "calculator"]
    answered = next(call for call in episode.tree.calls if call.extends == 0 and call.new_messages[0]["role"] == "tool")
    assert (tools["start"], tools["seconds"], tools["call"]) == (0.5, answered.started_s - 0.5, 0)


def test_an_older_record_has_its_own_scale() -> None:
    episode = an_episode()
    assert episode.environment is not None
    episode.began = episode.environment.began = 0.0
    entries = {entry["label"]: entry["start"] for entry in timeline(episode)["entries"]}
    assert entries["reset"] == 0.0 and entries["search the shelf"] == 0.0
    assert timeline(math_episode(Vocabulary(), random.Random(0)))["left_out"] == 0


def test_the_picture(tmp_path: Path, open_page: Callable[..., Page], shoot: Callable[[Page, str], None]) -> None:
    episode = an_episode()
    config = Config.model_validate({"ajet": {"experiment_name": "timed"}})
    with ExperimentFolder.open(config, exp_dir=tmp_path) as folder:
        recorder = EpisodeRecorder(folder.episodes)
        assert recorder.record(episode, 1).result()
        recorder.close()
    page = open_page(start(tmp_path), f"/x/timed/episode/{episode.episode_id}")
    page.get_by_role("tab", name="Timeline").click()
    rows = page.locator(".timeline .moment:not(.axis)")
    expect(rows).to_have_count(len(timeline(episode)["entries"]))
    step = rows.filter(has_text="step")
    expect(step).to_contain_text("it is broken")
    step.click()
    expect(page.locator(".moment-more[open]")).to_contain_text("go left")
    shoot(page, "timeline")
    boxes = [rows.filter(has_text=name).locator(".place i").bounding_box() for name in ("reset", "search the shelf")]
    assert boxes[0] and boxes[1] and boxes[0]["x"] < boxes[1]["x"]
    rows.filter(has_text="model call").first.click()
    expect(page.locator("#view-chat .message.current")).to_be_visible()
