"""`tutorial/example_prompt_tuning`: its house, its proposer, its model, and a search that finds the instruction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.backbone.prompt.journal import read_best
from ajet.cli.main import main
from ajet.prompt_tuning import Candidate, Kind, Request, Trial
from ajet.schema.resources import PromptSet, PromptTemplate
from support.tutorial_runs import ROOT, imports

CONF = "tutorial/example_prompt_tuning/prompt_tuning.yaml"
START = "You book files.rooms.\n{request}"


@pytest.fixture
def files() -> Iterator[Any]:
    """The tutorial's modules."""
    with imports("example_prompt_tuning"):
        import agent
        import make_data
        import proposer
        import rooms
        import sentences

        yield SimpleNamespace(agent=agent, make_data=make_data, proposer=proposer, rooms=rooms, sentences=sentences)


def asked(files: Any, kind: Kind, *, trials: tuple[Trial, ...] = (), feedback: str = "", draw: int = 0) -> str:
    candidate = Candidate("c0", PromptSet({"booker": PromptTemplate(START)}))
    return str(files.proposer.propose(Request(kind, [], candidate, ("booker",), trials, feedback, draw)))


def test_the_data_are_the_scripts_and_have_one_right_room(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = files.make_data.FOLDER
    monkeypatch.setattr(files.make_data, "FOLDER", tmp_path)
    files.make_data.main()
    for name in ("train", "validation"):
        assert (tmp_path / f"{name}.jsonl").read_text() == (committed / f"{name}.jsonl").read_text()
    rows = [
        json.loads(line)
        for name in ("train", "validation")
        for line in (files.make_data.FOLDER / f"{name}.jsonl").open()
    ]
    assert len(rows) == len({row["id"] for row in rows}) == 57
    for row in rows:
        assert files.rooms.best_room(files.rooms.Request(row["people"], row["device"], row["hour"])) == row["room"]


def test_a_room_is_judged_by_four_wishes(files: Any) -> None:
    request = files.rooms.Request(people=6, device="screen", hour=10)
    right = files.rooms.best_room(request)
    assert files.rooms.judge(request, right, looked=True) == (1.0, "")
    bigger = next(n for n in files.rooms.find(seats=6, device="screen", time=10) if n != right)
    reward, feedback = files.rooms.judge(request, bigger, looked=True)
    assert reward == 0.75 and "too big" in feedback
    reward, feedback = files.rooms.judge(request, 1, looked=False)
    assert reward == 0.0 and "3 seats, but 6 people" in feedback and "never looked" in feedback
    assert files.rooms.judge(request, None, looked=True)[0] == 0.0


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ('{"seats": "20"}', "2 9"),
        ('{"seats": "10", "device": "screen", "time": "11", "order": "size"}', "4 9"),
        ('{"seats": "99"}', "none"),
        ('{"seats": "many"}', "error: "),
        ("[]", "error: "),
        ("{", "error: "),
    ],
)
def test_the_tool(files: Any, arguments: str, answer: str) -> None:
    assert files.agent.search(arguments).startswith(answer)


def test_the_proposer_reads_the_feedback(files: Any) -> None:
    trials = tuple(Trial(str(n), 0.5, feedback=f"Room 1 is not free at this time, {n}.") for n in range(3))
    critique = asked(files, Kind.CRITIQUE, trials=trials)
    assert "not free at this time" in critique
    edit = asked(files, Kind.EDIT, feedback=critique)
    assert edit.startswith("<template>You book files.rooms.") and edit.endswith("{request}</template>")
    (added,) = [one for one in files.sentences.ALL if one in edit]
    assert files.proposer.words(added) & files.proposer.words(critique)
    assert len({asked(files, Kind.EDIT, feedback=critique, draw=draw) for draw in range(20)}) > 2, "not always the same"
    assert any(one in asked(files, Kind.REWRITE) for one in files.sentences.ALL)


def test_forty_sentences_of_which_eleven_matter(files: Any) -> None:
    assert len(files.sentences.ALL) == 40
    assert files.sentences.filters_of("Mind the number of seats. Be polite.") == ("seats",)
    assert files.sentences.filters_of("Answer at once. Mind the number of seats.") is None


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apo", "gepa"])
def test_a_search_finds_what_the_agent_must_be_told(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if algorithm == "gepa":
        pytest.importorskip("gepa")
    monkeypatch.chdir(ROOT)
    overrides = [f"prompt_tuning.algorithm={algorithm}", "prompt_tuning.budget.episodes=450", "experiment_name=rooms"]
    assert main(["--conf", CONF, "--exp-dir", str(tmp_path), "--quiet", *overrides]) == 0
    best = read_best(tmp_path / "rooms-prompt")
    assert best["confirmed"]["after"] - best["confirmed"]["before"] >= 0.1
    assert "{request}" in best["templates"]["booker"]["text"]


@pytest.mark.slow
def test_the_program_with_agent_lightnings_names_finds_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with imports("example_prompt_tuning"):
        import room_selector

        best = read_best(room_selector.main(str(tmp_path), episodes=150))
    assert best["confirmed"]["after"] - best["confirmed"]["before"] >= 0.1
    assert "{request}" in best["templates"]["booker"]["text"]
