"""Tasks that are both trained on and validated on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ajet.backbone.checks import read_tasks
from ajet.cli.main import main
from ajet.config import load_config
from ajet.schema.task import Task
from ajet.task_reader.quality import overlap

STORY = (
    "A farmer has seventeen sheep and nine goats, and on Monday she sells four of the sheep to her neighbour, who has "
    "none; how many animals does she have left in all?"
)
PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text()


def tasks(*asked: str, first: str = "t", **metadata: object) -> list[Task]:
    return [Task(task_id=f"{first}-{n}", main_query=text, metadata=metadata) for n, text in enumerate(asked, start=1)]


def found(training: list[Task], validation: list[Task]) -> list[tuple[str, str, bool]]:
    return [(pair.validation, pair.training, pair.share == 1.0) for pair in overlap(training, validation)]


def test_the_same_text_is_found_whatever_its_form() -> None:
    training = tasks("What is 3 + 4?", STORY, source="a")
    validation = tasks("what  is 3 + 4", "What is 3 - 4?", "What is 34?", STORY.upper(), first="v", source="b")
    assert found(training, validation) == [("v-1", "t-1", True), ("v-4", "t-2", True)]


def test_a_message_in_parts_is_its_text() -> None:
    def task(name: str, content: object) -> Task:
        return Task(task_id=name, init_messages=[{"role": "user", "content": content}])

    in_parts = [{"type": "text", "text": "What is 3 + 4?"}]
    assert found([task("a", "What is 3 + 4?")], [task("v", in_parts)]) == [("v", "a", True)]


def test_near_duplicates_share_most_of_their_passages() -> None:
    changed = STORY.replace("in all?", "by Tuesday?")
    other = "A farmer has seventeen sheep and nine goats, and wants to know how many legs stand on her meadow tonight."
    assert found(tasks("Name a colour.", STORY), tasks(changed, other, first="v")) == [("v-1", "t-2", False)]
    (pair,) = overlap(tasks(STORY), tasks(changed, first="v"))
    assert 0.6 <= pair.share < 1


def test_texts_without_spaces_are_compared_by_characters() -> None:
    story = "农场主有十七只绵羊和九只山羊，星期一她把四只绵羊卖给了没有羊的邻居，现在她一共还有多少只动物？"
    changed, other = (
        story.replace("现在她一共", "她总共"),
        "山羊和绵羊每天早上都要到河边喝水，农场主想知道一个星期要走多少路",
    )
    training, validation = tasks(story), tasks(changed, other, story.replace("？", "?"), first="v")
    assert found(training, validation) == [("v-3", "t-1", True), ("v-1", "t-1", False)]


def test_a_form_that_all_are_asked_in_shows_nothing() -> None:
    form = "Use each of the following numbers exactly once, with + - * / and brackets, to reach the target: {}"
    training = tasks(*(form.format(f"{n} {n + 1} {n + 2} → {3 * n}") for n in range(40)))
    validation = tasks(*(form.format(f"{n} {n + 5} {n + 9} → {2 * n}") for n in range(40, 60)), first="v")
    assert found(training, validation) == []


def test_where_several_ask_the_same_the_rest_decides() -> None:
    training = [Task(task_id=f"t-{n}", main_query="Repair it.", metadata={"files": {"m.py": str(n)}}) for n in range(3)]
    validation = [Task(task_id="v-1", main_query="Repair it.", metadata={"files": {"m.py": "7"}})]
    validation += [Task(task_id="v-2", main_query="Repair it.", metadata={"files": {"m.py": "2"}})]
    assert found(training, validation) == [("v-2", "t-2", True)]
    nothing = [Task(task_id=str(n)) for n in range(3)]
    assert found(nothing, [Task(task_id="7"), Task(task_id="1")]) == [("1", "1", True)]


def test_it_is_shown_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                  caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    sums = [f"What is {n} + 1?" for n in range(512)]
    sums[8] = STORY
    write("train.jsonl", "t", sums)
    asked = [f"What is {n} - 1?" for n in range(64)]
    asked[3], asked[9], asked[12] = "what is 17 + 1", "what is 40 + 1", STORY.replace("in all?", "by Tuesday?")
    write("validation.jsonl", "v", asked)
    files = "{training: {file_path: train.jsonl}, validation: {file_path: validation.jsonl}}"
    Path("a.yaml").write_text(
        f"ajet:\n  model: {{path: 'tiny:qwen2-0.3m'}}\n  task_reader: {{jsonl_dataset_file: {files}}}\n"
        "  rollout: {agent: {type: react}}\n  task_judge: {judge_protocol: ajet.task_judge.math_answer_as_judge->"
        "MathAnswerAsJudge}\n"
    )
    assert main(["tasks", "check", "a.yaml"]) == 1
    assert capsys.readouterr().out in PAGE
    with caplog.at_level(logging.WARNING):
        read_tasks(load_config("a.yaml"))
    warning = "also trained on: 2 of 64 validation tasks (v-3 = t-17, v-9 = t-40); validation measures memory there"
    assert [record.getMessage().startswith(warning) for record in caplog.records] == [True]
    assert main(["validate", "a.yaml"]) == 0
    assert f"warning    {warning}" in capsys.readouterr().out
    write("validation.jsonl", "v", ["What is 3 - 1?"])
    assert main(["tasks", "check", "a.yaml"]) == 0
    assert capsys.readouterr().out == "tasks             512 to train on, 1 to validate on\n"
    assert main(["tasks", "generate", "a.yaml"]) == 2
    write("validation.jsonl", "t", ["What is 3 - 1?"])
    assert main(["validate", "a.yaml"]) == 0
    assert "validation tasks that have the id of a training task and ask something else: 1 (first: 't-0')" in (
        capsys.readouterr().out
    )
    config = Path("a.yaml").read_text()
    Path("b.yaml").write_text(config.replace("validation.jsonl", "null"))
    Path("out_validation.jsonl").write_text("mine")
    assert main(["tasks", "generate", "b.yaml", "--out", "out.jsonl"]) == 0
    assert Path("out_validation.jsonl").read_text() == "mine", "there are none that could stand in it"


def write(file: str, name: str, asked: list[str]) -> None:
    rows = [{"id": f"{name}-{n}", "question": text, "answer": "1"} for n, text in enumerate(asked)]
    Path(file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
