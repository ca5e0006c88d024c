"""What the viewer reads of a search: whole, in its middle, damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.viewer.candidates import PromptHistory
from support.pages_of_viewer import signed_in
from support.synthetic_search import TASKS, write_search


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_search(tmp_path_factory.mktemp("searched"))


@pytest.fixture
def folder(searched: Path, tmp_path: Path) -> Path:
    """A copy of its `prompts/`, to damage."""
    (tmp_path / "x" / "prompts").mkdir(parents=True)
    for name in ("history.jsonl", "best.yaml"):
        (tmp_path / "x" / "prompts" / name).write_bytes((searched / "prompts" / name).read_bytes())
    return tmp_path / "x"


def view(folder: Path, running: bool = False) -> dict[str, Any]:
    return PromptHistory(folder).view(running)


def lines(folder: Path) -> list[str]:
    return (folder / "prompts/history.jsonl").read_text().splitlines(keepends=True)


def rewrite(folder: Path, new: list[str]) -> None:
    (folder / "prompts/history.jsonl").write_text("".join(new))


def test_everything_that_a_search_found_is_told(searched: Path) -> None:
    found = view(searched)
    assert found["problems"] == [] and not found["unfinished"] and not found["running"]
    assert found["started"]["algorithm"] == "apo" and found["started"]["tasks"] == TASKS
    start, *others = found["candidates"]
    assert start["id"] == "c0" and start["made_by"] == "start" and others
    known = {one["id"] for one in found["candidates"]}
    for one in others:
        assert set(one["parents"]) <= known and one["feedback"] and len(one["read"]) == 3
        assert all(trial["episodes"] and trial["task"] in TASKS["search"] for trial in one["read"])
        said = [trial["feedback"] for trial in one["read"] if trial["feedback"]]
        assert one["feedback"] == ("\n".join(sorted(set(said))) or "Well."), "what was read led to the criticism"
    store = EpisodeStore(searched / "episodes.sqlite")
    try:
        trials = [trial for score in found["scores"] for trial in score["trials"]]
        for trial in [*trials, *(trial for one in others for trial in one["read"])]:
            assert store.get(trial["episodes"][0]).episode.task_id == trial["task"]
    finally:
        store.close()
    assert [one["round"] for one in found["rounds"]] == [0, 1, 2, 3]
    assert all(one["rounds"] == 3 and one["left"]["episodes"] < 900 for one in found["rounds"])
    assert found["rounds"][-1]["best"] == found["best"]["candidate"]
    assert found["refused"] and "lacks the placeholder" in found["refused"][0]["reason"]
    assert found["ended"]["reason"] == "all rounds were run"
    assert found["ended"]["spent"]["episodes"] > found["rounds"][-1]["spent"]["episodes"], "with the confirmation"


def test_a_search_that_goes_on_is_told_as_far_as_it_is(tmp_path: Path) -> None:
    folder = write_search(tmp_path, end=False)
    history = PromptHistory(folder)
    found = history.view(running=True)
    assert found["unfinished"] and found["problems"] == [] and found["ended"] is None
    assert [one["id"] for one in found["candidates"] if one["unfinished"]] == [found["candidates"][-1]["id"]]
    assert history.view(running=True, known=found["stamp"]) == {"stamp": found["stamp"], "running": True}
    half = '{"event": "refused", "reason": "it is emp'
    with (folder / "prompts/history.jsonl").open("a") as file:
        file.write(half)
    assert history.view(running=True)["problems"] == [], "the line is being written"
    killed = history.view(running=False)
    assert killed["problems"] == [
        f"{folder}/prompts/history.jsonl, line {len(lines(folder))}: cut off while it was written, and left out"
    ]
    with (folder / "prompts/history.jsonl").open("a") as file:
        file.write('ty"}\n')
    whole = history.view(running=True, known=found["stamp"])
    assert whole["refused"][-1]["reason"] == "it is empty"


def test_half_a_surrogate_pair_leaves_the_page_readable(folder: Path) -> None:
    refused = {"event": "refused", "reason": "it lacks \ud83d", "texts": {"solver": "\udc00"}}
    rewrite(folder, [*lines(folder), json.dumps(refused) + "\n"])
    found = view(folder)
    assert found["refused"][-1]["reason"] == r"it lacks \ud83d" and msgspec.json.encode(found)


def test_a_damaged_line_costs_only_what_it_told(folder: Path) -> None:
    before = view(folder)
    damaged = lines(folder)
    numbers = [
        next(at for at, line in enumerate(damaged) if f'"event": "{event}"' in line)
        for event in ("scores", "candidate", "round")
    ]
    damaged[numbers[0]] = "garb\x00age\n"
    damaged[numbers[1]] = '{"event": "candidate", "id": "c0", "templates": {"solver": 3}}\n'
    damaged[numbers[2]] = '["a", "list"]\n'
    rewrite(folder, [*damaged, '{"event": "praise"}\n'])
    found = view(folder)
    assert len(found["problems"]) == 4
    for number, why in zip(numbers, ("Expecting value", "templates", "no event of a search"), strict=True):
        assert any(f"line {number + 1}: left out: " in one and why in one for one in found["problems"])
    assert len(found["scores"]) == len(before["scores"]) - 1
    assert len(found["candidates"]) == len(before["candidates"]) - 1
    assert found["ended"] == before["ended"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("candidate: [c1", "is damaged: "),
        ("templates: {}\n", "is damaged: Object missing required field `candidate`"),
        (None, "is missing. The history says that "),
        ("candidate: c0\n", "the search was stopped between the two. Resuming it puts that right"),
    ],
    ids=["yaml", "shape", "missing", "older"],
)
def test_a_best_file_that_says_something_else_is_named(folder: Path, text: str | None, why: str) -> None:
    file = folder / "prompts/best.yaml"
    file.unlink() if text is None else file.write_text(text)
    (problem,) = view(folder)["problems"]
    assert str(file) in problem and why in problem


def test_without_a_history_there_is_nothing_to_tell_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    assert view(tmp_path)["candidates"] == [] and view(tmp_path)["problems"] == []
    (tmp_path / "prompts/history.jsonl").mkdir()
    assert "can't be read" in view(tmp_path)["problems"][0]


def test_the_page_is_offered_where_prompts_were_tuned(searched: Path, experiments: Path) -> None:
    for root, name, offered in ((searched.parent, "searched-prompt", True), (experiments, "math-agent", False)):
        visitor = signed_in(root)
        assert (f"/x/{name}/candidates" in visitor.get(f"/x/{name}").text) is offered
        assert visitor.get(f"/x/{name}/candidates").status_code == 200
        answer = visitor.get(f"/api/x/{name}/candidates").json()
        assert bool(answer["candidates"]) is offered
        again = visitor.get(f"/api/x/{name}/candidates", params={"known": answer["stamp"]}).json()
        assert set(again) == {"stamp", "running"}
        assert visitor.get("/api/x/none/candidates").status_code == 404
