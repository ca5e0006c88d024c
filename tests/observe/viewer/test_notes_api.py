"""Notes and tags: kept, shown, filtered by; written only from the viewer's own pages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ajet.observe.viewer.library import Library
from ajet.observe.viewer.pages import Access
from ajet.observe.viewer.serve import create_app
from support.full_disk import files_up_to
from support.pages_of_viewer import signed_in

BASE = "http://127.0.0.1:8642"
NOTES = "/api/x/math-agent/notes"


@pytest.fixture
def folder(experiments: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(experiments / "math-agent", tmp_path / "math-agent"))


def sign_in(folder: Path, trajectories: Path | None = None) -> TestClient:
    return signed_in(folder.parent, trajectories=trajectories, base=BASE)


def an_episode(visitor: TestClient) -> str:
    return str(visitor.get("/api/x/math-agent/episodes?limit=1").json()["rows"][0]["episode_id"])


def test_a_note_is_kept_and_found(folder: Path) -> None:
    visitor = sign_in(folder)
    episode = an_episode(visitor)
    about = {"episode": episode, "note": " wrong sum \n", "tags": ["check", "reward  bug", "check", " "]}
    kept = visitor.post(NOTES, json=about).json()
    assert (kept["note"], kept["tags"]) == ("wrong sum", ["check", "reward bug"])
    assert visitor.post(NOTES, json={"note": "the good one", "tags": ["best"]}).status_code == 200
    again = sign_in(folder).get(NOTES).json()
    assert again["run"]["note"] == "the good one" and again["episodes"][episode]["tags"] == ["check", "reward bug"]
    assert visitor.get("/api/experiments").json()[0]["tags"] == ["best"]
    for query, count in (("note=any", 1), ("note=tag:reward bug", 1), ("note=tag:other", 0), ("", 240)):
        assert visitor.get(f"/api/x/math-agent/episodes?{query}").json()["total"] == count
    assert visitor.get("/api/x/math-agent/episodes?note=1=1").status_code == 400
    visitor.post(NOTES, json={"episode": episode, "note": "", "tags": []})
    assert visitor.get(NOTES).json()["episodes"] == {}
    assert json.loads((folder / "notes.json").read_text())["run"]["tags"] == ["best"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://elsewhere.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"origin": BASE, "sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_other_pages_can_not_write(folder: Path, headers: dict[str, str], status: int) -> None:
    body = json.dumps({"note": "x", "tags": []})
    answer = sign_in(folder).post(NOTES, content=body, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status
    assert (folder / "notes.json").exists() == (status == 200)


def test_who_is_not_signed_in_can_not_write(folder: Path) -> None:
    visitor = TestClient(create_app(Library(folder.parent), Access()), base_url=BASE)
    assert visitor.post(NOTES, json={"note": "x", "tags": []}).status_code == 401


@pytest.mark.parametrize(
    "body",
    [
        "{", "[]", '{"note": 3, "tags": []}', '{"note": "x", "tags": "y"}', '{"note": "x", "tags": [], "path": "/etc"}',
        json.dumps({"note": "x" * 20_001, "tags": []}), json.dumps({"note": "", "tags": ["y" * 41]}),
        json.dumps({"note": "", "tags": [str(number) for number in range(21)]}),
        json.dumps({"note": "x", "tags": [], "episode": "../../etc"}),
    ],
)  # fmt: skip
def test_what_is_no_note_is_refused(folder: Path, body: str) -> None:
    answer = sign_in(folder).post(NOTES, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404, 409) and answer.json()["error"]
    assert not (folder / "notes.json").exists()


def test_a_folder_that_can_not_be_written_to_is_said(folder: Path) -> None:
    visitor = sign_in(folder)
    with files_up_to(10):  # stands for a read-only folder: as root, none is
        answer = visitor.post(NOTES, json={"note": "x", "tags": []})
    assert answer.status_code == 409 and "the note was not kept" in answer.json()["error"]


def test_a_damaged_file_is_never_overwritten(folder: Path) -> None:
    (folder / "notes.json").write_text("{not json")
    answer = sign_in(folder).post(NOTES, json={"note": "x", "tags": []})
    assert answer.status_code == 409 and "notes.json" in answer.json()["error"]
    assert (folder / "notes.json").read_text() == "{not json"


def test_trajectories_say_why_they_take_none(folder: Path) -> None:
    visitor = sign_in(folder, Path("trajectories"))
    assert visitor.get(NOTES).json()["refused"]
    assert visitor.post(NOTES, json={"note": "x", "tags": []}).status_code == 409
