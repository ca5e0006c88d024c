"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ajet.schema.files import json_line, write_whole
from support.full_disk import files_up_to


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_written_whole_and_its_folder_made(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "new" / "file.txt"
    write_whole(file, "first", durable=durable)
    write_whole(file, "ö\nsecond", durable=durable)
    assert file.read_text(encoding="utf-8") == "ö\nsecond"
    assert list(file.parent.iterdir()) == [file]


def test_what_can_not_be_written_is_named_and_leaves_the_file_before(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    write_whole(file, "before")
    with files_up_to(100), pytest.raises(OSError, match=r"File too large: .*file\.txt"):
        write_whole(file, "x" * 1000)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(IsADirectoryError) as refused:
        write_whole(tmp_path, "x")
    assert str(refused.value) == f"[Errno 21] Is a directory: '{tmp_path}'"
    with pytest.raises(OSError, match=r"File name too long: '.*/n{300}'"):
        write_whole(tmp_path / ("n" * 300), "x")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "file.txt", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / f"file.txt.{os.getpid()}-{threading.get_ident()}.tmp").symlink_to(elsewhere)
    write_whole(file, "ours")
    assert elsewhere.read_text() == "mine" and not file.is_symlink() and file.read_text() == "ours"


def test_threads_may_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, replace = threading.Barrier(2), Path.replace

    def together(scratch: Path, file: Path) -> Path:
        both.wait(timeout=60)
        return replace(scratch, file)

    monkeypatch.setattr(Path, "replace", together)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write_whole, [tmp_path / "tasks.jsonl"] * 2, ["{}"] * 2))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("tasks.jsonl", "{}")]


def test_a_line_is_json_for_any_program() -> None:
    assert json_line({"a": [float("nan"), 1.5, 10**5000]}) == f'{{"a": [null, 1.5, "{hex(10**5000)}"]}}\n'
