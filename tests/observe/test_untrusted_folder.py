"""A run's folder can be anybody's: what lies in it is never waited for, followed elsewhere, or read without a bound."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ajet.observe.episode_store import EpisodeStore
from ajet.observe.episode_tables import EpisodeStoreError, open_for_writing
from ajet.observe.metrics import read_metrics
from ajet.observe.run_files import UnreadableFileError, open_regular, read_events, read_regular

FILES = ("config.resolved.yaml", "environment.json", "events.jsonl", "metrics.jsonl", "notes.json", "episodes.sqlite")


def run_folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text("ajet: {experiment_name: x, backbone: local}\n")
    (folder / "environment.json").write_text("{}")
    (folder / "events.jsonl").write_text(json.dumps({"time": 1.0, "event": "started"}) + "\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "return/mean": 0.5}) + "\n")
    return folder


def listed(root: Path) -> tuple[str, str]:
    """What `ajet runs` prints. It must end."""
    done = subprocess.run(
        [sys.executable, "-m", "ajet", "runs", str(root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_or_link_in_a_folder_holds_up_no_list(name: str, tmp_path: Path) -> None:
    run_folder(tmp_path, "mine")
    for kind in ("pipe", "link"):
        file = run_folder(tmp_path, kind) / name
        file.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(file)
        else:
            (tmp_path / "secret").write_text("secret: [")
            file.symlink_to(tmp_path / "secret")
    shown, problems = listed(tmp_path)
    assert "mine" in shown and "Traceback" not in problems
    assert "secret: [" not in shown + problems


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, link, pipe = tmp_path / "plain", tmp_path / "link", tmp_path / "pipe"
    plain.write_bytes(b"a\xffb\n")
    link.symlink_to(plain)
    os.mkfifo(pipe)
    assert read_regular(plain) == "a�b\n"
    for wrong in (link, pipe, tmp_path):
        with pytest.raises(UnreadableFileError, match=wrong.name):
            open_regular(wrong)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    monkeypatch.setattr("ajet.observe.run_files.MOST_BYTES", 3)
    with pytest.raises(UnreadableFileError, match="has 4 bytes, and at most 3 are read"):
        read_regular(plain)


def test_what_is_not_text_does_not_end_a_resume(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "run")
    for name in ("metrics.jsonl", "events.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'{"step": 2, "x": "\xff\xfe"}\n\x80\x81\n')
    assert [each["step"] for each in read_metrics(folder / "metrics.jsonl")] == [1, 2]
    assert read_events(folder / "events.jsonl")[0]["event"] == "started"


def test_a_view_in_place_of_the_episodes_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "episodes.sqlite"
    open_for_writing(file).close()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE episode")
        connection.execute(
            "CREATE VIEW episode AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id FROM n"
        )
    with pytest.raises(EpisodeStoreError, match="has a view"):
        EpisodeStore(file)


def test_a_database_that_no_run_has_written_to_holds_no_episodes(tmp_path: Path) -> None:
    file = tmp_path / "episodes.sqlite"
    file.touch()
    with pytest.raises(EpisodeStoreError, match=r"episodes.sqlite holds no episodes: no run has written to it"):
        EpisodeStore(file)
