"""An episode by time: model calls, tools, environment steps and spans on one scale."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from ajet.config import Config
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.tracing import emit_annotation, emit_message, emit_object, emit_reward, operation, record_spans
from ajet.observe.viewer.episode_view import timeline
from ajet.schema.episode import EnvironmentEvent, EnvironmentRecord, Episode
from ajet.schema.span import Span, SpanStatus
from support.pages_of_viewer import start
from support.synthetic_run import Vocabulary, math_episode

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


def test_spans_of_our_own_emitters_are_called_by_what_they_tell_of() -> None:
    episode = an_episode()
    with record_spans() as spans, operation(name="read the map"):
        emit_message("two ways\n  are open")
        emit_reward({"correct": 0.5, "brief": 1.0}, primary_key="correct")
        emit_object("x" * 1000)
        emit_annotation({"lake": {"free": 2}})
    episode.spans = list(spans)
    entries = timeline(episode)["entries"]
    found = {entry["label"]: entry["detail"] for entry in entries if entry["kind"] == "span"}
    assert found.pop("object") == "x" * 119 + "…"
    assert found == {"read the map": "", "message": "two ways are open", "reward": "0.5", "annotation": ""}
    steps = {entry["label"]: entry["detail"] for entry in entries if entry["kind"] == "environment"}
    assert steps == {"reset": "", "step": "go left"}


def opened(root: Path, open_page: Callable[..., Page], episode: Episode) -> Page:
    """The timeline of an episode, in a browser."""
    config = Config.model_validate({"ajet": {"experiment_name": "timed"}})
    with ExperimentFolder.open(config, exp_dir=root) as folder:
        recorder = EpisodeRecorder(folder.episodes)
        assert recorder.record(episode, 1).result()
        recorder.close()
    return open_page(start(root), f"/x/timed/episode/{episode.episode_id}?view=timeline")


@pytest.mark.parametrize("before", [None, "nothing", "a reset"])
def test_a_long_wait_leaves_room_for_the_rest(
    before: str | None, tmp_path: Path, open_page: Callable[..., Page]
) -> None:
    episode = an_episode()
    episode.spans = []
    if before == "nothing":
        episode.environment = None
    for index, call in enumerate(episode.tree.calls):
        call.started_s = index + (90.0 if before else 0.0)
    page = opened(tmp_path, open_page, episode)
    expect(page.locator(".timeline-legend")).to_contain_text("model call")
    expect(page.get_by_text("in which nothing was recorded")).to_have_count(1 if before else 0)
    calls = page.locator(".timeline .moment", has_text="model call")
    place, first, last = (
        found.bounding_box()
        for found in (calls.first.locator(".place"), calls.first.locator("i"), calls.last.locator("i"))
    )
    assert place and first and last
    assert first["width"] > 0.05 * place["width"], "half a second among some seconds"
    assert last["x"] + last["width"] <= place["x"] + place["width"] + 3, "no bar goes past the scale"


def test_the_picture(tmp_path: Path, open_page: Callable[..., Page]) -> None:
    episode = an_episode()
    page = opened(tmp_path, open_page, episode)
    rows = page.locator(".timeline .moment:not(.axis)")
    expect(rows).to_have_count(len(timeline(episode)["entries"]))
    step = rows.filter(has_text="step")
    expect(step).to_contain_text("it is broken")
    step.click()
    expect(page.locator(".moment-more[open]")).to_contain_text("go left")
    boxes = [rows.filter(has_text=name).locator(".place i").bounding_box() for name in ("reset", "search the shelf")]
    assert boxes[0] and boxes[1] and boxes[0]["x"] < boxes[1]["x"]
    rows.filter(has_text="model call").first.click()
    expect(page.locator("#view-chat .message.current")).to_be_visible()
