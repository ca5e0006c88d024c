"""The readers: how records become tasks, which ids they get, and how a bad line is reported."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from ajet.config import Config, make_config
from ajet.schema.errors import ImportPathError, TaskDataError
from ajet.schema.task import Task
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
from ajet.task_reader.task_reader_base import with_unique_ids


def reader_config(**keys: Any) -> Config:
    return make_config({f"task_reader.{key.replace('__', '.')}": value for key, value in keys.items()})


def jsonl(tmp_path: Path, *lines: Any, name: str = "tasks.jsonl", **keys: Any) -> list[Task]:
    """The training tasks of a file with these lines (text as it is, all else as JSON)."""
    file = tmp_path / name
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"\n".join(texts))
    return read_training_tasks(build_reader(reader_config(jsonl_dataset_file__training__file_path=str(file), **keys)))


def test_fields_make_a_task_and_the_rest_is_metadata(tmp_path: Path) -> None:
    record = {"question": "1+1?", "answer": "2", "id": 7, "tag": "easy", "metadata": {"level": 1}, "env_type": "sum"}
    (task,) = jsonl(tmp_path, record)
    assert task == Task(
        main_query="1+1?", task_id="7", env_type="sum", metadata={"answer": "2", "level": 1, "tag": "easy"}
    )


def test_an_environment_may_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "lakes.jsonl").write_text('{"id": "3"}\n{"id": "4", "question": "Be quick."}\n')
    keys = {"task_reader.jsonl_dataset_file.training.file_path": str(tmp_path / "lakes.jsonl")}
    with pytest.raises(TaskDataError, match=r"lakes\.jsonl:1: no field main_query"):
        read_training_tasks(build_reader(make_config(keys)))
    acting = make_config({**keys, "rollout.environment": "gymnasium:FrozenLake-v1"})
    tasks = read_training_tasks(build_reader(acting))
    assert [(task.task_id, task.main_query) for task in tasks] == [("3", ""), ("4", "Be quick.")]


@pytest.mark.parametrize("name", ["main_query", "question", "prompt", "query"])
def test_the_problem_may_stand_in_several_fields(tmp_path: Path, name: str) -> None:
    assert jsonl(tmp_path, {name: "Why?"})[0].main_query == "Why?"


def test_the_mapping_is_configurable(tmp_path: Path) -> None:
    (task,) = jsonl(tmp_path, {"aufgabe": "Warum?", "question": "x"}, fields__main_query="aufgabe")
    assert (task.main_query, task.metadata) == ("Warum?", {"question": "x"})


def test_messages_are_taken_as_they_are(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for record in ({"prompt": messages}, {"messages": messages}, {"init_messages": messages}):
        (task,) = jsonl(tmp_path, record)
        assert (task.main_query, task.init_messages) == ("Hi", messages)


def test_the_question_is_the_users_and_a_shown_answer_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    (task,) = jsonl(tmp_path, {"messages": [*parts, {"role": "user", "content": None}]})
    assert task.main_query == "Hi"
    assert "assistant" not in caplog.text
    (task,) = jsonl(tmp_path, {"messages": [*parts, {"role": "assistant", "content": "Yo"}]})
    assert task.main_query == "Hi"
    assert "1 of 1 training tasks have messages that end with the assistant's" in caplog.text
    (task,) = jsonl(tmp_path, {"messages": [{"role": "system", "content": "Begin."}]})
    assert task.main_query == "Begin."


def test_blank_lines_bom_and_line_separators(tmp_path: Path) -> None:
    tasks = jsonl(tmp_path, b'\xef\xbb\xbf{"query": "a"}', b"  ", '{"query": "b\u2028c"}'.encode(), b"")
    assert [task.main_query for task in tasks] == ["a", "b\u2028c"]


def test_an_id_that_all_tasks_share_takes_no_longer_with_each() -> None:
    tasks = [Task(main_query=str(number), task_id="x") for number in range(20_000)]
    began = time.monotonic()
    unique, _ = with_unique_ids(tasks)
    assert time.monotonic() - began < 8 and unique[-1].task_id == "x-20000"


def test_ids_are_unique_stable_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"query": "a", "id": "x"}, {"query": "b", "id": "x"}, {"query": "c", "id": "x-2"}, {"query": "d"}]
    with caplog.at_level(logging.INFO, "ajet.task_reader"):
        first = [task.task_id for task in jsonl(tmp_path, *lines)]
    assert len(caplog.records) == 1
    assert first[:3] == ["x", "x-3", "x-2"]
    assert len(set(first)) == 4
    assert [task.task_id for task in jsonl(tmp_path, *lines, name="again.jsonl")] == first
    assert jsonl(tmp_path, {"query": "d"})[0].task_id == first[3]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"query": "a"', "not JSON.* column"),
        (b"\xff\xfe", r"not UTF-8 \(byte 1"),
        ([1, 2], "expected an object with fields, found a list"),
        ({"text": "a"}, "no field main_query / question / prompt / query .*fields here: text.*fields.main_query"),
        ({"query": 5}, "should be text, found a number"),
        ({"query": "a", "metadata": [1]}, "metadata should be an object, found a list"),
        ({"messages": ["hi"]}, "messages should be a list of objects"),
        (b'{"query": "a", "x": NaN}', "NaN isn't a JSON number"),
        (b'{"query": ' + b"[" * 200_000, "nested too deeply|not JSON"),
        (b'{"query": "a", "x": ' + b"9" * 5000 + b"}", "not usable JSON"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(TaskDataError, match=rf"tasks\.jsonl:2: .*(?:{says})"):
        jsonl(tmp_path, {"query": "a"}, line)


def test_bad_lines_can_be_tolerated_up_to_a_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [b"x", {"query": "a"}, b"y", {"query": "b"}]
    assert [task.main_query for task in jsonl(tmp_path, *lines, skip_bad_lines=2)] == ["a", "b"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [warning.split(":")[1] for warning in warnings] == ["1", "3"]
    with pytest.raises(TaskDataError, match=r":3: .*\n1 bad lines before it"):
        jsonl(tmp_path, *lines, skip_bad_lines=1)


def test_empty_missing_and_not_given(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match="contains no tasks"):
        jsonl(tmp_path, b"")
    with pytest.raises(TaskDataError, match="one JSON list"):
        jsonl(tmp_path, b"[", b'{"query": "a"}]')
    with pytest.raises(TaskDataError, match=r"tasks\.csv:1: not JSON.*\n.*`task_reader\.type: huggingface_dat_repo`"):
        jsonl(tmp_path, b"question;answer", name="tasks.csv")
    with pytest.raises(TaskDataError, match=r"nowhere\.jsonl: No such file"):
        read_training_tasks(
            build_reader(reader_config(jsonl_dataset_file__training__file_path=str(tmp_path / "nowhere.jsonl")))
        )
    with pytest.raises(TaskDataError, match="file_path is missing"):
        read_training_tasks(build_reader(reader_config()))
    assert read_validation_tasks(build_reader(reader_config())) == []


def test_the_former_name_of_the_jsonl_reader(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"query": "a"}')
    config = reader_config(type="dataset_file", dataset_file={"training": {"file_path": str(tmp_path / "t.jsonl")}})
    assert read_training_tasks(build_reader(config))[0].main_query == "a"


OWN_READER = """
from ajet import Task
from ajet.task_reader.task_reader_base import BaseTaskReader

class MyReader(BaseTaskReader):
    def __init__(self, reader_config):
        super().__init__(reader_config)
        self.count = reader_config.options.count
    def get_training_tasks(self):
        assert self.config.ajet.task_reader is self.reader_config
        return [Task(main_query=f"task {index}") for index in range(self.count)]

class Wrong(BaseTaskReader):
    def get_training_tasks(self):
        return ["text"]

class Numbered(BaseTaskReader):
    def get_training_tasks(self):
        task = Task(main_query="a")
        task.task_id = 5
        return [task]

class One(BaseTaskReader):
    def get_training_tasks(self):
        return Task(main_query="a")

class Unrelated: pass

class Misspelt(BaseTaskReader):
    def get_training_tasks(self):
        return (Task(question=text) for text in "ab")

class Needless(BaseTaskReader):
    def __init__(self): pass
    def get_training_tasks(self): return []
"""


def test_a_reader_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_READER)

    def own(name: str) -> list[Task]:
        config = reader_config(type=f"own.py->{name}", options={"count": 3})
        config.remember_source(tmp_path / "run.yaml")
        return read_training_tasks(build_reader(config))

    assert len({task.task_id for task in own("MyReader")}) == 3
    misspelt = r"Misspelt.get_training_tasks\(\) raised ValidationError: question: .* not permitted, at .*own\.py:31 in"
    with pytest.raises(TaskDataError, match=misspelt):
        own("Misspelt")
    with pytest.raises(TaskDataError, match=r"should return a list of ajet\.Task, but returned str"):
        own("Wrong")
    with pytest.raises(TaskDataError, match=r"should return a list of ajet\.Task, but returned Task"):
        own("One")
    with pytest.raises(TaskDataError, match="the task_id of task 1 should be text, not 5"):
        own("Numbered")
    with pytest.raises(ImportPathError, match=r"^ajet\.task_reader\.type: the run makes a Needless\(reader_config\)"):
        own("Needless")
    with pytest.raises(
        ImportPathError, match=r"isn't a class derived .*; there is: MyReader, Wrong, Numbered, One, Mis"
    ):
        own("Unrelated")


def test_random_dummy_is_the_same_for_the_same_seed() -> None:
    def read(seed: int) -> list[Task]:
        return read_training_tasks(build_reader(reader_config(type="random_dummy", seed=seed)))

    assert read(1) == read(1) != read(2)
    assert sorted(task.metadata["random_number"] for task in read(1)) == list(range(1000))


def test_random_dummy_has_the_order_ids_and_validation_tasks_of_agentjet() -> None:
    reader = build_reader(reader_config(type="random_dummy"))
    tasks = read_training_tasks(reader)
    assert [task.task_id for task in tasks[:4]] == ["521", "737", "740", "660"]
    assert all(task.task_id == str(task.metadata["random_number"]) for task in tasks)
    assert read_validation_tasks(reader) == tasks
    few = build_reader(reader_config(type="random_dummy", random_dummy={"num_tasks": 2, "num_validation_tasks": 3}))
    assert sorted(task.task_id for task in read_validation_tasks(few)) == ["2", "3", "4"]
