"""Tasks from traces: Studio's SQLite, OTLP JSON, our episodes; the split, the filters, and damaged files."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from ajet.config import Config, make_config
from ajet.observe.recorder import EpisodeRecorder
from ajet.schema.errors import TaskDataError
from ajet.schema.task import Task
from ajet.task_reader import build_reader
from ajet.task_reader.task_reader_base import BaseTaskReader
from ajet.task_reader.tracing import exchanges
from support.http_server import Server
from support.scripted_helper import helper
from support.synthetic_run import write_experiment
from support.tracker_helpers import Drive, episode_of, user


def studio(path: Path, *attributes: Any) -> Path:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS span_table (name TEXT, attributes TEXT)")
        for each in attributes:
            text = each if isinstance(each, str) else json.dumps(each)
            connection.execute("INSERT INTO span_table VALUES ('ReActAgent.reply', ?)", (text,))
    connection.close()
    return path


def printed(query: str, reply: Any) -> dict[str, Any]:
    return {
        "input": {"kwargs": {"msg": f"Msg(id='1', name='user', content={query!r}, role='user')"}},
        "output": f"Msg(id='2', name='agent', content={reply!r}, role='assistant')",
    }


def configured(tmp_path: Path, *paths: Path, block: str = "tracing", **keys: Any) -> BaseTaskReader:
    values = {"base_url": [str(path) for path in paths], **keys}
    config: Config = make_config({"task_reader.type": "tracing", f"task_reader.{block}": values})
    config.remember_folder(tmp_path / "run")
    return build_reader(config)


def both(reader: BaseTaskReader) -> list[Task]:
    return [*reader.get_training_tasks(), *reader.get_validation_tasks()]


@pytest.mark.parametrize(
    ("attributes", "query", "reply"),
    [
        (printed("What's 1 + 1?", "It's 2"), "What's 1 + 1?", "It's 2"),
        (printed("a\nb", [{"type": "tool_use"}, {"type": "text", "text": "two"}]), "a\nb", "two"),
        (printed("f(x)=[1], role='x'?", "y)"), "f(x)=[1], role='x'?", "y)"),
        ({"input.kwargs.msg": "Msg(id='1', content='it's\nreal', role='user')", "output": printed("", "yes")["output"]},
         "it's\nreal", "yes"),
        ({"gen_ai": {"input": {"messages": json.dumps([{"role": "user", "parts": [{"content": "hm?"}]}])},
                     "output": {"messages": [{"role": "assistant", "parts": [{"type": "text", "content": "ha"}]}]}}},
         "hm?", "ha"),
    ],
)  # fmt: skip
def test_what_studio_wrote_in_its_versions(tmp_path: Path, attributes: Any, query: str, reply: str) -> None:
    (found,) = exchanges(studio(tmp_path / "s.sqlite3", attributes))
    assert (found.query, found.reply, found.trace) == (query, reply, "s.sqlite3, span 1")


def test_spans_without_an_exchange_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = studio(tmp_path / "s.db", "not json", {}, "[]", printed("", "x"), printed("q", "a"))
    assert [found.query for found in exchanges(path)] == ["q"]
    assert "4 spans hold no question" in caplog.text


def attribute(key: str, value: Any) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value if isinstance(value, str) else json.dumps(value)}}


def span(trace: str, name: str, start: int, **messages: Any) -> dict[str, Any]:
    attributes = [attribute(f"gen_ai.{key}.messages", value) for key, value in messages.items()]
    return {"traceId": trace, "name": name, "startTimeUnixNano": str(start), "attributes": attributes}


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def said(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "parts": [{"type": "text", "content": text}]}]


def test_otlp_files(tmp_path: Path) -> None:
    outer = span("1", "invoke_agent maths", 5, input=said("user", "outer?"), output=said("assistant", "outer!"))
    call = span("1", "chat m", 1, input=said("user", "inner?"), output=said("assistant", "inner!"))
    first = span("2", "chat m", 1, input=said("user", "first?"), output=said("assistant", "no"))
    last = span("2", "chat m", 9, input=said("user", "second?"), output=said("assistant", "last!"))
    (tmp_path / "a.json").write_text(json.dumps(otlp(outer, call)))
    (tmp_path / "b.jsonl").write_text(f"{json.dumps(otlp(last))}\n{json.dumps(otlp(first))}\n")
    assert [(found.query, found.reply) for found in exchanges(tmp_path)] == [("outer?", "outer!"), ("first?", "last!")]


@pytest.mark.parametrize("folder", ["a #1", "a?b", "50%20 off"])
def test_any_path_will_do_and_is_only_read(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    path = studio(tmp_path / folder / "s.db", printed("q?", "r"))
    assert [found.query for found in exchanges(path)] == ["q?"]
    assert [each.name for each in tmp_path.iterdir()] == [folder]


def test_a_message_that_repeats_a_mark_is_read_in_no_time(tmp_path: Path) -> None:
    many = studio(tmp_path / "s.db", printed("content=" * 100_000, "r"), {"input.kwargs.msg": "content=" * 100_000})
    began = time.process_time()
    assert [len(found.query) for found in exchanges(many)] == [800_000]
    assert time.process_time() - began < 10  # seconds; it was hours


@pytest.mark.parametrize("time", ["²", "9" * 5000])
def test_half_a_character_and_an_odd_time(tmp_path: Path, caplog: pytest.LogCaptureFixture, time: str) -> None:
    half, whole = (
        span("1", "invoke_agent a", 1, input=said("user", f"q{end}?"), output=said("assistant", "r"))
        for end in ("\ud83d", "")
    )
    (tmp_path / "a.json").write_text(json.dumps(otlp({**whole, "startTimeUnixNano": time})))
    (tmp_path / "b.json").write_text(json.dumps(otlp(half)))
    studio(tmp_path / "c.db", printed("\ud83d", "r"), {"input.kwargs.msg": 3})
    assert [found.query for found in exchanges(tmp_path)] == ["q?"]
    assert "1 traces hold no question" in caplog.text and "2 spans hold no question" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("a.sqlite", b"SQLite format 3\0" + b"rubbish" * 300, r"a\.sqlite: can't be read: "),
        ("a.sqlite", b"rubbish", "not an SQLite file"),
        ("a.json", b"{", r"a\.json:1: not JSON"),
        ("a.json", b"{}", "no OpenTelemetry spans"),
        ("a.json", b"\xff\xfe", "can't be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, wrong: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskDataError, match=wrong):
        list(exchanges(tmp_path / name))


def test_an_empty_folder_and_another_database(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match="holds no trace file"):
        list(exchanges(tmp_path))
    sqlite3.connect(tmp_path / "x.db").execute("CREATE TABLE other (a)").connection.close()
    with pytest.raises(TaskDataError, match=r"expected a table `span_table`.*it has: other"):
        list(exchanges(tmp_path / "x.db"))
    with pytest.raises(TaskDataError, match="base_url is missing"):
        configured(tmp_path).get_training_tasks()


def test_the_split_stays_when_traces_are_added(tmp_path: Path) -> None:
    path = studio(tmp_path / "s.db", *(printed(f"question {number}?", "a") for number in range(40)))
    first = configured(tmp_path, path, validation_share=0.5)
    before = {task.main_query for task in first.get_validation_tasks()}
    studio(path, *(printed(f"new question {number}?", "a") for number in range(40)))
    second = configured(tmp_path, path, validation_share=0.5)
    after = {task.main_query for task in second.get_validation_tasks()}
    assert 8 < len(before) < 32 and {query for query in after if not query.startswith("new")} == before
    assert len(both(second)) == 80 and len({task.task_id for task in both(second)}) == 80


def test_a_single_trace_trains(tmp_path: Path) -> None:
    for number in range(6):
        path = studio(tmp_path / f"{number}.db", printed(f"question {number}?", "a"))
        reader = configured(tmp_path, path, validation_share=0.5)
        assert len(reader.get_training_tasks()) == 1 and reader.get_validation_tasks() == []


def test_near_duplicates_are_found_by_the_embedding_model(tmp_path: Path) -> None:
    asked: list[str] = []

    def vectors(_path: str, body: dict[str, Any], _key: str) -> Any:
        assert body["model"] == "vectors"
        asked.extend(body["input"])
        rows = [[1.0, 0.1] if "weather" in text or "rain" in text else [0.0, 2.0] for text in body["input"]]
        data = [{"index": n, "object": "embedding", "embedding": row} for n, row in enumerate(rows)]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        return 200, {}, {"object": "list", "data": data[::-1], "model": "m", "usage": usage}

    questions = ["How is the weather?", "Will it rain?", "Will it rain on day 2?", "What is the capital?"]
    path = studio(tmp_path / "s.db", *(printed(question, "a") for question in questions))
    server = Server(vectors)
    try:
        for _ in range(2):
            reader = configured(tmp_path, path, validation_share=0.0, filters=[{"type": "deduplication"}])
            helper_keys = {"helper.embedding_model": "vectors", "helper.base_url": server.url}
            reader.config.ajet.helper = make_config(helper_keys).ajet.helper  # no chat model is needed for it
            kept = [task.main_query for task in reader.get_training_tasks()]
            assert kept == [questions[0], *questions[2:]] and sorted(asked) == sorted(questions)
    finally:
        server.http.shutdown()


def test_the_marked_result_is_the_reference(tmp_path: Path) -> None:
    replies = [r"so \boxed{1} and \boxed{\frac{1}{\sqrt{2}}}", "thus\n#### 42 \n", "just text"]
    path = studio(tmp_path / "s.db", *(printed(f"q{n}", reply) for n, reply in enumerate(replies)))
    tasks = sorted(both(configured(tmp_path, path, validation_share=0.0)), key=lambda task: task.main_query)
    assert [task.metadata["answer"] for task in tasks] == [r"\frac{1}{\sqrt{2}}", "42", "just text"]
    assert tasks[0].metadata["reply"] == replies[0] and tasks[0].env_type == "no_env"


def test_filters_and_the_file_of_accepted_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pairs = [
        ("good one?", "yes"),
        ("bad one?", "no idea"),
        ("Good one ?", "yes"),
        ("good one?", "other"),
        ("more?", "1"),
    ]
    path = studio(tmp_path / "s.db", *(printed(*pair) for pair in pairs))

    def opinion(question: str) -> str:
        assert "Only sums." in question
        return json.dumps({"good": "no idea" not in question})

    keys: dict[str, Any] = {
        "train_output_path": "~/out/tasks.jsonl",
        "validation_share": 0.0,
        "max_thread": 4,
        "filters": [
            {"type": "deduplication", "params": {"similarity_threshold": 0.8, "db_path": "x"}},
            {"type": "llm_evaluate", "params": {"custom_rubrics": "Only sums.", "print_reason": True}},
            {"type": "llm_evaluate", "enabled": False},
        ],
    }
    with helper(opinion) as server:

        def read() -> list[str]:
            reader = configured(tmp_path, path, block="feedback_tracing", **keys)
            reader.config.ajet.helper.model, reader.config.ajet.helper.base_url = "big", server.url
            return [task.main_query for task in reader.get_training_tasks()]

        assert read() == ["good one?", "more?"] and len(server.seen) == 3
        studio(path, printed("newest?", "2"))
        assert read() == ["good one?", "more?", "newest?"]
        assert len(server.seen) == 4, "only what is new is reviewed"
    assert len((tmp_path / "out" / "tasks.jsonl").read_text().splitlines()) == 3
    (tmp_path / "out" / "tasks.jsonl").write_text("rubbish\n")
    with pytest.raises(TaskDataError, match=r"tasks\.jsonl:1: not a task that this reader wrote"):
        both(configured(tmp_path, path, **keys))


def test_nothing_left_is_said(tmp_path: Path) -> None:
    path = studio(tmp_path / "s.db", printed("q", "a"))
    with pytest.raises(TaskDataError, match="all 1 tasks are on the validation side"):
        configured(tmp_path, path, validation_share=1.0).get_training_tasks()


def test_our_own_episodes(tmp_path: Path) -> None:
    run = write_experiment(tmp_path, steps=3)
    found = list(exchanges(run / "episodes.sqlite"))
    assert found and all(each.query and each.reply for each in found)
    good = list(exchanges(run / "episodes.sqlite", min_reward=1.0))
    assert 0 < len(good) < len(found)


def test_the_answer_of_an_episode_is_no_reply_that_another_one_replaced(tmp_path: Path) -> None:
    drive = Drive()
    votes = [drive.begin([user("Vote.")]) for _ in range(3)]
    for call, text in zip(votes, ("red", "green", "blue"), strict=True):
        drive.commit(call, {"role": "assistant", "content": text})
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite")
    recorder.record(episode_of(drive.tracker.finish(1.0, output="green")), 1, task=Task(task_id="task", main_query="?"))
    recorder.close()
    assert [each.reply for each in exchanges(tmp_path / "episodes.sqlite")] == ["green"]
