"""The `datasets` reader over local files and folders."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ajet.config import make_config
from ajet.schema.errors import TaskDataError
from ajet.schema.task import Task
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
from ajet.task_reader.task_reader_base import BaseTaskReader

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(5)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def reader(**keys: Any) -> BaseTaskReader:
    overrides = {f"task_reader.huggingface_dat_repo.{key}": value for key, value in keys.items()}
    config = make_config({"task_reader.type": "huggingface_dat_repo", **overrides})
    return build_reader(config)


def expected() -> list[tuple[str, dict[str, Any]]]:
    return [(row["question"], {"answer": row["answer"]}) for row in ROWS]


def seen(tasks: list[Task]) -> list[tuple[str, dict[str, Any]]]:
    return [(task.main_query, task.metadata) for task in tasks]


def test_a_parquet_file(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    assert seen(read_training_tasks(reader(dataset_path=str(tmp_path / "rows.parquet")))) == expected()


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_json_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows.{suffix}"
    file.write_text(json.dumps(ROWS) if suffix == "json" else "\n".join(map(json.dumps, ROWS)))
    assert seen(read_training_tasks(reader(dataset_path=str(file)))) == expected()


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_as_excel_exports_it(tmp_path: Path, separator: str) -> None:
    lines = [f"question{separator}answer", *(f"{row['question']}{separator}{row['answer']}" for row in ROWS)]
    lines[2:2] = [""]
    (tmp_path / "rows.csv").write_text("\r\n".join(lines), encoding="utf-8-sig")
    tasks = read_training_tasks(reader(dataset_path=str(tmp_path / "rows.csv")))
    assert [(task.main_query, str(task.metadata["answer"])) for task in tasks] == [
        (row["question"], row["answer"]) for row in ROWS
    ]


@pytest.mark.parametrize("header", ['"a; b; c",answer', '"a, b, c";answer', "answer"])
def test_what_is_in_quotes_separates_no_columns(tmp_path: Path, header: str) -> None:
    (tmp_path / "rows.csv").write_text(f"{header}\n{header.replace('answer', '7')}\n")
    (task,) = read_training_tasks(reader(dataset_path=str(tmp_path / "rows.csv")))
    assert str(task.metadata["answer"]) == "7"


def test_a_folder_of_splits_and_a_saved_data_set(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "plain"
    folder.mkdir()
    for split in ("train", "test"):
        datasets.Dataset.from_list(ROWS[: 3 if split == "test" else 5]).to_parquet(str(folder / f"{split}.parquet"))
    data = datasets.load_dataset(str(folder))
    data.save_to_disk(str(tmp_path / "saved"))
    for path in (folder, tmp_path / "saved"):
        both = reader(dataset_path=str(path), validation_split="test")
        assert seen(read_training_tasks(both)) == expected()
        assert [task.task_id for task in read_training_tasks(both)] == [f"train-{n}" for n in range(5)]
        assert seen(read_validation_tasks(both)) == expected()[:3]
        assert [task.task_id for task in read_validation_tasks(both)] == [f"test-{n}" for n in range(3)]
        with pytest.raises(TaskDataError, match=r"no split 'tset'; it has 'train', 'test'; did you mean 'test'\?"):
            read_training_tasks(reader(dataset_path=str(path), training_split="tset"))


def test_a_comma_in_a_text_without_quotes_moves_no_columns(tmp_path: Path) -> None:
    rows = tmp_path / "tables" / "rows.csv"
    rows.parent.mkdir()
    rows.write_text("question,answer\nWhat is 1,000 + 1?,1001\nWhat is 2 + 2?,4\n")
    for path in (rows, rows.parent):
        with pytest.raises(TaskDataError, match=rf"{path.name}: its rows have more columns .* in quotes"):
            read_training_tasks(reader(dataset_path=str(path)))


@pytest.mark.parametrize("folder", [False, True])
def test_texts_stay_as_a_csv_file_has_them(tmp_path: Path, folder: bool) -> None:
    rows = tmp_path / "tables" / "rows.csv"
    rows.parent.mkdir()
    rows.write_text("question,answer,level,share\na,None,3,0.5\nb,NA,4,\nc,,,1\n")
    tasks = read_training_tasks(reader(dataset_path=str(rows.parent if folder else rows)))
    assert [str(task.metadata) for task in tasks] == [
        "{'answer': 'None', 'level': 3, 'share': 0.5}",
        "{'answer': 'NA', 'level': 4, 'share': None}",
        "{'answer': None, 'level': None, 'share': 1.0}",
    ]


@pytest.mark.parametrize("folder", [False, True])
def test_dates_of_a_json_file_are_text(tmp_path: Path, folder: bool) -> None:
    rows = tmp_path / "tables" / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"question": "a", "answer": "1990-05-03"}\n{"question": "b", "answer": "1991-01-01"}\n')
    tasks = read_training_tasks(reader(dataset_path=str(rows.parent if folder else rows)))
    assert [task.metadata for task in tasks] == [{"answer": "1990-05-03"}, {"answer": "1991-01-01"}]
    rows.write_text('{"question": "a", "answer": "1990-05-03T10:30:00"}\n')
    (task,) = read_training_tasks(reader(dataset_path=str(rows.parent if folder else rows)))
    assert "10" in str(task.metadata["answer"]), "a time of day is not cut off"


def test_numbers_with_an_na_beyond_the_first_rows_are_read(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("question,level\n" + "".join(f"q{row},{row}\n" for row in range(10_000)) + "last,NA\n")
    tasks = read_training_tasks(reader(dataset_path=str(rows)))
    assert (tasks[7].metadata, tasks[-1].metadata) == ({"level": 7}, {"level": None})


def test_a_folder_of_another_kind_may_hold_a_csv_file(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("a", "b"):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
            file.write(json.dumps(ROWS[0]) + "\n")
    (folder / "notes.csv").write_text("note\nNA\n")
    assert len(read_training_tasks(reader(dataset_path=str(folder)))) == 2


def test_a_saved_data_set_is_left_as_it_is(tmp_path: Path) -> None:
    import datasets

    rows = tmp_path / "rows.csv"
    rows.write_text("question,score\na,1.0\nb,\n")
    datasets.load_dataset("csv", data_files=str(rows))["train"].save_to_disk(str(tmp_path / "saved"))
    before = sorted((tmp_path / "saved").iterdir())
    assert str(read_training_tasks(reader(dataset_path=str(tmp_path / "saved")))[0].metadata) == "{'score': 1.0}"
    assert sorted((tmp_path / "saved").iterdir()) == before


def test_errors_name_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "wrong.jsonl").write_text('{"question": "a"}\n{"question": 7}\n')
    with pytest.raises(TaskDataError, match="dataset_path is missing"):
        read_training_tasks(reader())
    with pytest.raises(TaskDataError, match="unknown file type; expected one of"):
        read_training_tasks(reader(dataset_path=str(tmp_path / "rows.txt")))
    with pytest.raises(TaskDataError, match="can't read"):
        read_training_tasks(reader(dataset_path=str(tmp_path / "bad.json")))
    (tmp_path / "ansi.csv").write_text("question;answer\nGröße?;1", encoding="cp1252")
    with pytest.raises(TaskDataError, match=r"can't decode byte.*: save it as UTF-8$"):
        read_training_tasks(reader(dataset_path=str(tmp_path / "ansi.csv")))
    with pytest.raises(TaskDataError, match=r"wrong\.jsonl \[train\], row 2: 'question' should be text"):
        read_training_tasks(reader(dataset_path=str(tmp_path / "wrong.jsonl")))
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_dict({})).save_to_disk(
        str(tmp_path / "half")
    )
    with pytest.raises(TaskDataError, match=r"can't read .*half'"):
        read_training_tasks(reader(dataset_path=str(tmp_path / "half")))
    with pytest.raises(TaskDataError, match=r"can't read.*no such file or folder"):
        read_training_tasks(reader(dataset_path=str(tmp_path / "nowhere")))


def test_records_without_a_question_keep_their_fields_and_are_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n{"problem": "2+2?", "answer": "4"}\n')
    tasks = read_training_tasks(reader(dataset_path=str(tmp_path / "rows.jsonl")))
    assert seen(tasks) == [("", {"problem": "1+1?", "answer": "2"}), ("", {"problem": "2+2?", "answer": "4"})]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "2 of 2 records have no field" in said and "(problem, answer); ajet.task_reader.fields.main_query" in said
