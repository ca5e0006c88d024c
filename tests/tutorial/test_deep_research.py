"""Deep research: the library, the reward, an episode with real tools and scripted replies, and runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.engine.scripted import ScriptedCall
from ajet.schema.task import Task
from support.tutorial_runs import TUTORIAL, debug, imports, play, train

CONF = "example_deep_research/deep_research.yaml"
FOLDER = TUTORIAL / "example_deep_research"


@pytest.fixture
def files() -> Iterator[Any]:
    with imports("example_deep_research"):
        import corpus
        import deep_research
        import make_data

        yield type("Files", (), {"corpus": corpus, "research": deep_research, "make_data": make_data})


def test_the_shipped_data_is_what_its_script_makes(files: Any, tmp_path: Path) -> None:
    files.make_data.write(tmp_path, 9)
    for made in tmp_path.iterdir():
        assert made.read_text() == (FOLDER / "data" / made.name).read_text(), made.name


def test_every_answer_is_in_the_library(files: Any) -> None:
    library = files.corpus.load(str(FOLDER / "data" / "corpus.jsonl"))
    for split in ("train", "validation"):
        for line in (FOLDER / "data" / f"{split}.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert any(row["answer"] in page.text for page in library.pages.values())
            if row["tag"] == "one page":
                assert any(row["answer"] in page.text for page in library.search(row["question"]))


def test_a_broken_library_is_named(files: Any, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"id": "p1", "title": "t", "text": "x"}\n{"id": "p2"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl:2: expected"):
        files.corpus.load(str(tmp_path / "c.jsonl"))


@pytest.mark.parametrize(
    ("report", "reward"),
    [
        ("Answer: Ada Abel [p1]", 1.0),
        ("I read both.\nanswer\nAnswer: ada abel, see [p1][p2].", 1.0),
        ("Answer: Ada Abel [p2][p1]", 0.5),
        ("Answer: Ada Lund, Bruno Kruse, Greta Frey, Ada Abel [p1]", 0.0),
        ("Answer: Ada Abel [p2]", 0.5),
        ("Answer: Ada Abel [p99]", 0.5),
        ("Answer: Ada Abel", 0.5),
        ("Answer: Ada Abelson [p1]", 0.0),
        ("Ada Abel [p1]", 0.0),
        ("Answer: Ada Abel [p1]\nAnswer: nobody", 0.0),
        ("", 0.0),
    ],
)
def test_reward(files: Any, report: str, reward: float) -> None:
    page = files.corpus.Page
    library = files.corpus.Corpus([page("p1", "Town", "Its mayor is Ada Abel."), page("p2", "Bridge", "It is old.")])
    assert files.research.grade(report, "Ada Abel", library)[0] == reward


def test_an_episode_with_real_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    row = json.loads((FOLDER / "data" / "train.jsonl").read_text().splitlines()[0])
    pages = [json.loads(line) for line in (FOLDER / "data" / "corpus.jsonl").read_text().splitlines()]
    right = next(page for page in pages if row["answer"] in page["text"])

    def replies(call: ScriptedCall) -> object:
        if "You plan research" in call.prompt:
            return f"- {right['title']}\n"
        if "You look something up" in call.prompt:
            if right["text"][-20:] in call.prompt:
                return f"{right['text']} [{right['id']}]"
            found = f"[{right['id']}]" in call.prompt
            name, arguments = ("read", {"page": right["id"]}) if found else ("search", {"query": right["title"]})
            return {"tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}
        assert right["text"] in call.prompt
        return f"Answer: {row['answer']} [{right['id']}]"

    task = Task(task_id="t", main_query=row["question"], metadata={"answer": row["answer"]})
    episode = play(monkeypatch, CONF, task, replies)
    assert episode.failure is None, episode.failure
    assert episode.reward == 1.0 and episode.is_success
    assert [call.agent for call in episode.tree.calls] == ["planner", "searcher", "searcher", "searcher", "writer"]
    assert episode.ledger.trained == episode.ledger.captured > 0


@pytest.mark.slow
def test_on_debug_and_two_steps_on_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ["rollout.max_response_length_in_one_turn=8", "rollout.compute_madness_checklist=[]"]
    episodes = debug(monkeypatch, CONF, tmp_path / "debug", *short)
    assert len(episodes) == 2 and all(episode.reward == 0 for episode in episodes)
    train(monkeypatch, CONF, tmp_path / "local", *short)
