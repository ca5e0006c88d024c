"""Tasks written from documents, by a scripted model on a real socket: provenance, leaks, resuming, what goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ajet.task_judge.helper
from ajet.cli.main import main
from ajet.config import Config, make_config
from ajet.schema.errors import TaskDataError
from ajet.task_judge.helper import HelperError
from ajet.task_judge.helper_answers import NearDuplicates
from ajet.task_reader import build_reader, read_training_tasks, read_validation_tasks
from ajet.task_reader.data_generation import LEAKED, REFUSED
from ajet.task_reader.documents import Document, chunks_of, read_documents
from support.scripted_helper import helper

TEXT = "The lighthouse was built in 1854. It is 31 metres high. Its keeper was Ada Brand.\n\nThe harbour froze in 1871."


def writer(question: str) -> str:
    """Stands in for a model that follows the prompts."""
    if "good" in question and "<task>" in question and "decide" in question:
        return json.dumps({"good": "forbidden" not in question, "reason": "because"})
    if "exactly" in question:
        return json.dumps(
            [
                {"query": "When was the lighthouse built?", "answer": "1854", "related_doc": "was built  in 1854"},
                {"query": "Who kept it?", "answer": "Ada Brand", "related_doc": "Its keeper was Ada Brand."},
                {"query": "Who kept it?", "answer": "Ada Brand", "related_doc": "Its keeper was Ada Brand."},
                {"query": "What colour is it?", "answer": "red", "related_doc": "It is red."},
                {"query": "Something forbidden?", "answer": "1871", "related_doc": "The harbour froze in 1871."},
            ]
        )
    number = re.findall(r"should be number (\d+)", question)[0]
    return json.dumps({"query": f"In which year was pier {number} built?", "answer": "1900"})


def configured(tmp_path: Path, url: str, **keys: Any) -> Config:
    (tmp_path / "docs").mkdir(exist_ok=True)
    if not (tmp_path / "docs" / "a.md").exists():
        (tmp_path / "docs" / "a.md").write_text(TEXT)
    config = make_config(
        {
            "helper.model": "big",
            "helper.base_url": url,
            "helper.api_key": "none",
            "task_reader.type": "data_generation",
            "task_reader.data_generation": {
                "document_reader": {"document_path": str(tmp_path / "docs")},
                "task_num": 3,
                **keys,
            },
        }
    )
    config.remember_folder(tmp_path / "run")
    return config


def test_questions_validate_and_variations_train(tmp_path: Path) -> None:
    with helper(writer) as server:
        reader = build_reader(configured(tmp_path, server.url))
        validation, training = read_validation_tasks(reader), read_training_tasks(reader)
    assert [task.main_query for task in validation] == ["When was the lighthouse built?", "Who kept it?"]
    first = validation[0].metadata
    assert first["answer"] == "1854" and first["related_doc_source"] == "docs/a.md"
    place = first["place"]
    assert TEXT[place["start"] : place["end"]] == "was built in 1854"
    assert [task.main_query for task in training] == [f"In which year was pier {n} built?" for n in (1, 2, 3)]
    one = training[0].metadata
    assert one["aug_type"] == "task_augmentation" and one["source_doc_id"] == "docs/a.md"
    assert one["source_task_id"] in {task.task_id for task in validation}
    assert len({task.task_id for task in (*training, *validation)}) == 5


def test_the_second_run_asks_nothing_and_a_change_asks_again(tmp_path: Path) -> None:
    with helper(writer) as server:

        def queries(**keys: Any) -> list[str]:
            return [
                task.main_query for task in build_reader(configured(tmp_path, server.url, **keys)).get_training_tasks()
            ]

        first, asked = queries(), len(server.seen)
        assert queries() == first and len(server.seen) == asked
        queries(llm_model="other")
        assert len(server.seen) == 2 * asked, "another model is asked everything"
        (tmp_path / "docs" / "a.md").write_text(TEXT + " More.")
        queries()
        assert len(server.seen) > 2 * asked, "so is a changed document"


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ajet.task_judge.helper, "MAX_RETRIES", 0)
    left = [4]

    def dies(question: str) -> Any:
        left[0] -= 1
        return writer(question) if left[0] >= 0 else (503, {}, {"error": {"message": "down"}})

    with helper(dies) as server:
        with pytest.raises(HelperError, match="down"):
            build_reader(configured(tmp_path, server.url, num_workers=1)).get_training_tasks()
        left[0] = 1000
        before = len(server.seen)
        assert len(build_reader(configured(tmp_path, server.url)).get_training_tasks()) == 3
        again = [body["messages"][-1]["content"] for _, body, _ in server.seen[before:]]
    assert not any("exactly" in question for question in again), "what was answered is not asked again"


def test_training_repeats_no_validation_task(tmp_path: Path) -> None:
    def leaks(question: str) -> str:
        if "should be number" in question and "number 2 " not in question:
            return json.dumps({"query": "When was the LIGHTHOUSE built ?", "answer": "1854"})
        return writer(question)

    with helper(leaks) as server:
        reader = build_reader(configured(tmp_path, server.url))
        training = reader.get_training_tasks()
        assert [task.main_query for task in training] == ["In which year was pier 2 built?"]
        assert reader.written.left_out[LEAKED] > 0  # type: ignore[attr-defined]


def test_examples_alone_will_do(tmp_path: Path) -> None:
    (tmp_path / "seeds.jsonl").write_text('{"query": "In which year was pier 0 built?", "answer": "1890"}')
    with helper(writer) as server:
        keys = {
            "document_reader": {"document_path": []},
            "query_reader": {"jsonl_dataset_file": {"training": {"file_path": str(tmp_path / "seeds.jsonl")}}},
        }
        reader = build_reader(configured(tmp_path, server.url, **keys))
        assert len(reader.get_training_tasks()) == 3
        assert [task.metadata["answer"] for task in reader.get_validation_tasks()] == ["1890"]


@pytest.mark.parametrize("answer", ["no JSON", "[]", '[{"query": "?"}]', '{"query": "?"}'])
def test_unusable_answers_are_named_and_end_the_writing(tmp_path: Path, answer: str) -> None:
    with helper(lambda _: answer) as server, pytest.raises(TaskDataError, match="no usable question"):
        build_reader(configured(tmp_path, server.url)).get_training_tasks()


REFUSAL = (400, {}, {"error": {"message": "content filter"}})


@pytest.mark.parametrize("llm_filter", [True, False])
def test_a_refused_document_is_left_out_with_its_reason(
    tmp_path: Path, llm_filter: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "ajet.task_reader")
    config_keys = {"task_num": 20, "llm_filter": llm_filter}
    with helper(lambda question: REFUSAL if "poison" in question else writer(question)) as server:
        config = configured(tmp_path, server.url, **config_keys)
        (tmp_path / "docs" / "b.md").write_text("A text about poison.")
        reader = build_reader(config)
        assert reader.get_validation_tasks()[0].main_query == "When was the lighthouse built?"
        assert {task.metadata["source_doc_id"] for task in reader.get_training_tasks()} == {"docs/a.md"}
        assert reader.written.left_out[REFUSED] > 0  # type: ignore[attr-defined]
    assert "refused: a question about docs/b.md" in caplog.text and "content filter" in caplog.text


def test_a_model_that_refuses_every_document_is_an_error(tmp_path: Path) -> None:
    with (
        helper(lambda _: REFUSAL) as server,
        pytest.raises(TaskDataError, match=r"1 refused questions, .*content filter"),
    ):
        build_reader(configured(tmp_path, server.url)).get_training_tasks()


def test_a_dead_helper_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ajet.task_judge.helper, "MAX_RETRIES", 0)
    with pytest.raises(HelperError, match=r"'big' at http://127\.0\.0\.1:9/v1: APIConnectionError"):
        build_reader(configured(tmp_path, "http://127.0.0.1:9/v1")).get_training_tasks()


def test_the_command_saves_both_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "a.txt").write_text(TEXT)
    with helper(writer) as server:
        (tmp_path / "run.yaml").write_text(
            f"""
ajet:
  helper: {{model: big, base_url: "{server.url}", api_key: none}}
  task_reader:
    type: data_generation
    data_generation: {{task_num: 2, document_reader: {{document_path: [papers], languages: [eng]}}}}
"""
        )
        out = tmp_path / "out" / "tasks.jsonl"
        command = ["tasks", "generate", str(tmp_path / "run.yaml"), "--out", str(out), "--exp-dir", str(tmp_path)]
        assert main(command) == 0
    assert f"2 tasks to train on: {out}" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    assert (
        json.loads(out.with_name("tasks_validation.jsonl").read_text().splitlines()[0])["metadata"]["answer"] == "1854"
    )


def test_tasks_that_json_can_not_hold_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reader.py").write_text(
        """
from ajet import Task
from ajet.task_reader.task_reader_base import BaseTaskReader


class Pictures(BaseTaskReader):
    def get_training_tasks(self):
        return [Task(main_query="a", task_id="a"), Task(main_query="b", task_id="b", metadata={"image": b"\\xff"})]
"""
    )
    (tmp_path / "run.yaml").write_text("ajet: {task_reader: {type: reader.py->Pictures}}\n")
    out = tmp_path / "tasks.jsonl"
    assert main(["tasks", "generate", str(tmp_path / "run.yaml"), "--out", str(out)]) == 2
    assert f"task 'b': its metadata can't be written to {out}" in capsys.readouterr().err
    assert not out.exists()


# ---------------------------------------------------------------- documents


def _pdf(path: Path) -> None:
    stream = b"BT /F1 12 Tf 72 720 Td (The lighthouse was built in 1854.) Tj ET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 5\n0000000000 65535 f \n%strailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
    path.write_bytes(data + end % (table, len(data)))


def _docx(path: Path) -> None:
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.add_paragraph("The lighthouse was built in 1854.")
    document.add_table(1, 2).rows[0].cells[1].text = "31 metres"
    document.save(str(path))


def _html(path: Path) -> None:
    path.write_text(
        "<head><title>x</title></head><script>evil()</script><p>The lighthouse\n was built in 1854.<p>B &amp; C"
    )


WRITE: dict[str, Callable[[Path], None]] = {".pdf": _pdf, ".docx": _docx, ".html": _html}


@pytest.mark.parametrize("suffix", WRITE)
def test_documents_become_text(tmp_path: Path, suffix: str) -> None:
    WRITE[suffix](tmp_path / f"a{suffix}")
    (document,) = read_documents([str(tmp_path)])
    assert "The lighthouse was built in 1854." in document.text
    assert "evil" not in document.text and document.source.endswith(f"a{suffix}")
    assert "31 metres" in document.text or suffix != ".docx"
    assert "B & C" in document.text or suffix != ".html"


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("a.pdf", b"%PDF-1.4 rubbish", "a.pdf: not a readable PDF"),
        ("a.docx", b"PK rubbish", "a.docx: not a readable Word document"),
        ("a.txt", b"\xff\xfe\x00", "a.txt: can't be read"),
        ("a.xyz", b"text", "the folder .* holds no document"),
        ("a.md", b"  \n", "none of the documents holds any text"),
    ],
)
def test_unreadable_documents_are_named(tmp_path: Path, name: str, content: bytes, wrong: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskDataError, match=wrong):
        read_documents([str(tmp_path)])


def test_an_empty_folder_and_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match="holds no document"):
        read_documents([str(tmp_path)])
    with pytest.raises(TaskDataError, match="no file or folder"):
        read_documents([str(tmp_path / "nowhere")])


@pytest.mark.parametrize("split_by", ["sentence", "paragraph", "character"])
def test_chunks_cover_the_document_and_know_their_place(split_by: str) -> None:
    chunks = chunks_of(Document("a", TEXT), 40, split_by)
    assert len(chunks) > 1 and [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert "".join("".join(chunk.text for chunk in chunks).split()) == "".join(TEXT.split())
    assert all(chunk.text[:10] in TEXT[chunk.start : chunk.start + 14] for chunk in chunks)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is the capital of France?", "what is the capital of  FRANCE", True),
        ("What is 3 + 4?", "What is 3 + 5?", False),
        ("Tell me what the capital of France is, please", "Tell me what the capital of Spain is, please", False),
        ("灯塔是哪一年建成的？", "灯塔是哪一年建成的", True),
        ("", "", True),
        ("???", "!!!", False),
    ],
)
def test_near_duplicates(one: str, other: str, same: bool) -> None:
    known = NearDuplicates(0.8)
    known.add(one)
    assert (known.find(other) is not None) is same
