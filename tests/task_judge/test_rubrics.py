"""Rubrics: written from graded examples, kept as a file that people may edit, and used to grade. Real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import ajet.task_judge.helper
from ajet.cli.main import main
from ajet.config import Config, make_config
from ajet.schema.errors import ConfigError, UserError
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import JudgedEpisode, Judgement
from ajet.task_judge.helper import HelperError
from ajet.task_judge.rm_auto_grader_judge import AutoGraderJudge, GraderScore, Rank
from ajet.task_judge.rubrics import Rubrics, RubricsError, RubricsJudge
from support.scripted_helper import helper

POINTWISE = [
    {"main_query": "1 + 1?", "answer": "2", "score": 1},
    {"main_query": "1 + 2?", "answer": "5", "score": 0},
]
LISTWISE = [{"main_query": "1 + 1?", "candidates": [{"answer": "4", "rank": 2}, {"answer": "2", "rank": 1}]}]


def truth(query: str, answer: str) -> float:
    left, right = map(int, re.findall(r"\d+", query))
    return float(answer.strip() == str(left + right))


def grader(question: str) -> str:
    """Stands in for a model: proposes numbered rubrics, and grades sums rightly once a rubric asks for it."""
    if "Sum them up" in question:
        return json.dumps({"rubrics": ["All of it."]})
    if "You write rubrics" in question:
        better = "Write better ones" in question
        return json.dumps({"rubrics": ["The sum must be right." if better else f"Be nice {len(question)}."]})
    query = re.findall(r"<query>\n(.*?)\n</query>", question)[0]
    fair = "must be right" in question
    if "<answer number" in question:
        shown = re.findall(r'<answer number="(\d+)">\n(.*?)\n</answer>', question)
        order = sorted(shown, key=lambda each: -truth(query, each[1]) if fair else int(each[0]))
        return json.dumps({"ranking": [int(number) for number, _ in order]})
    answer = re.findall(r"<answer>\n(.*?)\n</answer>", question)[0]
    return json.dumps({"reason": "because", "score": truth(query, answer) if fair else 0.5})


def configured(tmp_path: Path, url: str, examples: list[dict[str, Any]] | None, **keys: Any) -> Config:
    section: dict[str, Any] = dict(keys)
    if examples is not None:
        (tmp_path / "examples.jsonl").write_text("\n".join(map(json.dumps, examples)))
        section["dataset_file"] = {"training": {"file_path": str(tmp_path / "examples.jsonl")}}
        section["input_data_type"] = "dataset_file"
    given = {"helper.model": "big", "helper.base_url": url, "helper.api_key": "none"}
    config = make_config({**given, "task_judge.rubrics_auto_grader": section})
    config.remember_folder(tmp_path / "run")
    return config


def rewards(judge: RubricsJudge, query: str, *answers: str) -> list[Judgement]:
    task = WorkflowTask(task=Task(main_query=query))
    judged = [JudgedEpisode(task, WorkflowOutput(metadata={"final_answer": answer})) for answer in answers]
    return asyncio.run(judge.compute_group_rewards(judged))


def test_rubrics_are_revised_until_they_agree_and_then_used(tmp_path: Path) -> None:
    with helper(grader) as server:
        judge = RubricsJudge(configured(tmp_path, server.url, POINTWISE))
        judge.prepare()
        assert judge.rubrics is not None and judge.rubrics.texts == ["The sum must be right."]
        assert judge.rubrics.about["agree_within_a_tenth"] == 1.0 and judge.rubrics.about["mean_error"] == 0
        assert [each.reward for each in rewards(judge, "2 + 2?", "4", "5")] == [1, 0]
        asked = len(server.seen)
        again = RubricsJudge(configured(tmp_path, server.url, POINTWISE))
        assert [each.reward for each in rewards(again, "2 + 2?", "4", "5")] == [1, 0]
        assert len(server.seen) == asked, "rubrics and gradings are cached"
    written = yaml.safe_load((tmp_path / "run" / "cache" / "rubrics.yaml").read_text())
    assert written["rubrics"] == ["The sum must be right."] and written["model"] == "big"


def test_a_tenth_of_the_scale_agrees_whatever_the_numbers(tmp_path: Path) -> None:
    scores = [(0.1, 0.2), (0.3, 0.4), (0.8, 0.7), (1.0, 0.9), (0.5, 0.39)]
    given = {f"answer {number}": str(score) for number, (_, score) in enumerate(scores)}

    def answered(asked: str) -> str:
        found = next(score for answer, score in given.items() if answer in asked)
        return '{"rubrics": ["The sum must be right."]}' if "You write rubrics" in asked else f'{{"score": {found}}}'

    examples = [{"main_query": "?", "answer": f"answer {at}", "score": label} for at, (label, _) in enumerate(scores)]
    with helper(answered) as server:
        config = configured(tmp_path, server.url, examples, max_epochs=1)
        file = tmp_path / "examples.jsonl"
        file.write_text(file.read_text(), encoding="utf-8-sig")
        judge = RubricsJudge(config)
        judge.prepare()
    assert judge.rubrics is not None and judge.rubrics.about["agree_within_a_tenth"] == 0.8


def test_listwise_rubrics_rank_a_group(tmp_path: Path) -> None:
    with helper(grader) as server:
        judge = RubricsJudge(configured(tmp_path, server.url, LISTWISE, grader_mode="listwise", max_score=2))
        judge.prepare()
        assert judge.rubrics is not None and judge.rubrics.about["pairs_in_right_order"] == 1.0
        said = rewards(judge, "2 + 2?", "5", "4", "6")
    assert said[1].reward == 2 and said[0].reward == said[2].reward == 0.5, "both orders: equals share"


def test_a_file_that_a_person_edited_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("rubrics:\n  - The sum must be right {query}.\n")
    with helper(grader) as server:
        judge = RubricsJudge(configured(tmp_path, server.url, None, rubrics_file="~/mine.yaml"))
        assert rewards(judge, "2 + 2?", "4")[0].reward == 1


def test_themes_and_similar_ones(tmp_path: Path) -> None:
    with helper(grader) as server:
        judge = RubricsJudge(configured(tmp_path, server.url, POINTWISE, enable_categorization=True, max_epochs=1))
        assert judge.load_or_write().texts == ["All of it."]
        smart = configured(tmp_path, server.url, POINTWISE, sampling_mode="smart_sampling", generate_number=9)
        assert RubricsJudge(smart).load_or_write(again=True).texts == ["The sum must be right."]
    assert len(list((tmp_path / "run" / "cache").glob("rubrics.*.yaml"))) == 1, "the earlier file is kept"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("rubrics: []", "expected `rubrics:` with a list"),
        ("rubrics: [fine, Style: be brief]", r"rubric 2 is \{'Style': 'be brief'\}, not a text\n    put it in quotes"),
        ("rubrics: [yes]", "rubric 1 is True"),
        ("a: [", "not YAML"),
        ("just text", "expected `rubrics:`"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, wrong: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(RubricsError, match=rf"mine\.yaml: .*{wrong}"):
        Rubrics.load(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("examples", "mode", "wrong"),
    [
        (
            [{"main_query": "?", "answer": "2", "score": 7}],
            "pointwise",
            r"jsonl:1: .*from 0 to 1.*score is 7",
        ),
        ([{"main_query": "?", "answer": "2"}], "pointwise", "score is None"),
        ([{"answer": "2", "score": 1}], "pointwise", "no field 'main_query'"),
        ([{"main_query": "?", "candidates": [{"answer": "2", "rank": 1}]}], "listwise", "at least two"),
        ([], "pointwise", "no examples"),
    ],
)
def test_examples_that_make_no_sense_are_named(
    tmp_path: Path, examples: list[dict[str, Any]], mode: str, wrong: str
) -> None:
    judge = RubricsJudge(configured(tmp_path, "http://127.0.0.1:9/v1", examples, grader_mode=mode))
    with pytest.raises(UserError, match=wrong):
        judge.prepare()


def test_without_examples_or_a_file_there_are_no_rubrics(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.file_path: rubrics are written from graded examples"):
        RubricsJudge(configured(tmp_path, "http://127.0.0.1:9/v1", None)).prepare()


def test_a_dead_helper_is_named_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ajet.task_judge.helper, "MAX_RETRIES", 0)
    judge = RubricsJudge(configured(tmp_path, "http://127.0.0.1:9/v1", POINTWISE))
    with pytest.raises(HelperError, match="APIConnectionError"):
        judge.prepare()
    assert not judge.path.exists()


def test_a_prompt_of_ones_own_needs_its_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"custom_evaluation_prompt: a pointwise prompt needs \{rubrics\}"):
        RubricsJudge(configured(tmp_path, "http://127.0.0.1:9/v1", None, custom_evaluation_prompt="{answer}"))
    with pytest.raises(ConfigError, match="no prompt for language 'en'"):
        RubricsJudge(configured(tmp_path, "http://127.0.0.1:9/v1", None, custom_evaluation_prompt={"zh": "x"}))
    listwise = {"grader_mode": "listwise", "custom_evaluation_prompt": "{rubrics} {answers} {conversation}"}
    with pytest.raises(
        ConfigError, match=r"custom_evaluation_prompt: \{conversation\} differs from episode to episode"
    ):
        RubricsJudge(configured(tmp_path, "http://127.0.0.1:9/v1", None, **listwise))


def test_the_command_writes_and_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "examples.jsonl").write_text("\n".join(map(json.dumps, POINTWISE)))
    (tmp_path / "tasks.jsonl").write_text('{"query": "a"}')
    with helper(grader) as server:
        (tmp_path / "run.yaml").write_text(
            f"""
ajet:
  helper: {{model: big, base_url: "{server.url}", api_key: none}}
  task_reader: {{jsonl_dataset_file: {{training: {{file_path: tasks.jsonl}}}}}}
  task_judge:
    judge_type: rubrics_auto_grader
    rubrics_auto_grader: {{jsonl_dataset_file: {{training: {{file_path: examples.jsonl}}}}}}
"""
        )
        command = ["rubrics", "make", str(tmp_path / "run.yaml"), "--exp-dir", str(tmp_path / "exps")]
        assert main(command) == 0 and main(command) == 0
    said = capsys.readouterr().out
    path = tmp_path / "exps" / "run" / "cache" / "rubrics.yaml"
    assert "1. The sum must be right." in said and f"written: {path}" in said and f"already there: {path}" in said


def _attributes(values: dict[str, Any]) -> Any:
    return SimpleNamespace(
        **{key: _attributes(value) if isinstance(value, dict) else value for key, value in values.items()}
    )


def test_a_script_of_the_former_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer: Callable[[str], str] = grader
    with helper(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.delenv("DASHSCOPE_API_KEY", raising=False)
        block = {"model_name": "big", "grader_mode": "pointwise", "min_score": 0, "max_score": 1, "cache": False}
        config = _attributes({"ajet": {"task_judge": {"rubrics_auto_grader": block}, "experiment_dir": str(tmp_path)}})
        judge = AutoGraderJudge(config)
        tasks = [Task(main_query=row["main_query"], metadata={**row}) for row in POINTWISE]
        asyncio.run(judge.generate_rubrics_from_samples(tasks))
        judge = AutoGraderJudge(config)
        asyncio.run(judge.load_rubrics_from_cache())

        async def ask(output: Any) -> Any:
            return await judge._async_compute_reward(Task(main_query="3 + 4?"), output)

        good, bad = (WorkflowOutput(metadata={"final_answer": text}) for text in ("7", "8"))
        assert asyncio.run(ask(good)) == GraderScore(1.0, "because")
        assert asyncio.run(ask([bad, good])) == Rank([2, 1], "because")
