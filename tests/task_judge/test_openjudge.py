"""Graders of py-openjudge, with the real package (`make test-openjudge`), and what is said without it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ajet.config import Config, load_config, make_config
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import ConfigError, JudgeFault
from ajet.schema.task import Task, WorkflowOutput, WorkflowTask
from ajet.task_judge import openjudge
from ajet.task_judge.base_judge import JudgedCall, JudgedEpisode, Judgement, load_judge, validate_reward
from ajet.task_judge.openjudge import OpenJudge
from ajet.task_runner.runtime import Runtime
from support.scripted_helper import helper

PYTHON = os.environ.get("AJET_OPENJUDGE_PYTHON", "")
needs_openjudge = pytest.mark.skipif(not PYTHON, reason="AJET_OPENJUDGE_PYTHON names no interpreter with py-openjudge")
OWN = """
import asyncio, os, time
from openjudge.graders.base_grader import BaseGrader, GraderMode, GraderScore
from openjudge.graders.schema import GraderError

class OddGrader(BaseGrader):
    async def _aevaluate(self, response, wish="", **more):
        if response == "raise":
            raise KeyError("mine")
        if response == "error":
            return GraderError(name="odd", error="no opinion")
        if response == "hang":
            await asyncio.sleep(600)
        if response == "block":
            time.sleep(600)
        if response == "exit":
            os._exit(3)
        if response == "pid":
            return GraderScore(name="odd", score=0.5, reason=str(os.getpid()))
        return GraderScore(name="odd", score=float(response), reason=f"{wish} {more}")

class RankingGrader(OddGrader):
    def __init__(self):
        super().__init__(mode=GraderMode.LISTWISE)
"""


def configured(grader: str, **keys: Any) -> Config:
    section = {"grader": grader, "python": PYTHON or None, **keys}
    helper_keys = {name: section.pop(name) for name in ("helper.model", "helper.base_url") if name in section}
    return make_config(
        {
            "task_judge.judge_type": "openjudge",
            **{f"task_judge.openjudge.{name}": value for name, value in section.items()},
            **helper_keys,
        }
    )


def episode(answer: str, right: str = "42") -> JudgedEpisode:
    task = Task(main_query="What is 40 + 2?", task_id="t", metadata={"answer": right})
    calls = [JudgedCall("solver", [{"role": "user", "content": "Go"}], {"role": "assistant", "content": "last"})]
    return JudgedEpisode(WorkflowTask(task=task), WorkflowOutput(metadata={"final_answer": answer}), calls)


def judge(config: Config) -> OpenJudge:
    found = load_judge(config)
    assert isinstance(found, OpenJudge)
    found.prepare()
    return found


def graded(found: OpenJudge, answer: str, right: str = "42") -> Judgement:
    (said,) = asyncio.run(found.compute_group_rewards([episode(answer, right)]))
    return validate_reward(said)


@pytest.fixture
def odd(tmp_path: Path) -> str:
    (tmp_path / "odd.py").write_text(textwrap.dedent(OWN))
    return str(tmp_path)


def odd_config(folder: str, name: str = "OddGrader", **keys: Any) -> Config:
    """A grader of one's own, made importable by the interpreter that has the package."""
    wrapper = Path(folder) / "python"
    if not wrapper.exists():
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {PYTHON} "$@"\n')
        wrapper.chmod(0o755)
    return configured(f"odd->{name}", **{"python": str(wrapper), **keys})


@needs_openjudge
def test_a_grader_by_name_compares_with_the_reference() -> None:
    found = judge(configured("StringMatchGrader", options={"algorithm": "exact_match"}))
    right, wrong = graded(found, "42"), graded(found, "41")
    assert (right.reward, right.is_success) == (1.0, True) and right.notes["reason"]
    assert (wrong.reward, wrong.is_success) == (0.0, False)


@needs_openjudge
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_reference_is_not_found_in_every_answer(empty: str) -> None:
    keys = {"options": {"algorithm": "substring_match"}}
    with pytest.raises(JudgeFault, match=r"task 't' has an empty reference answer.* metadata 'answer'"):
        graded(judge(configured("StringMatchGrader", **keys)), "anything", right=empty)
    wanted = judge(configured("StringMatchGrader", **keys, inputs={"reference_response": "any"}))
    assert graded(wanted, "anything", right=empty).reward == 1


@needs_openjudge
def test_a_grader_that_asks_a_model_asks_the_helper() -> None:
    with helper(lambda _: json.dumps({"score": 4, "reason": "nearly"})) as server:
        keys = {"helper.model": "big", "helper.base_url": server.url, "min_score": 1, "max_score": 5}
        said = graded(judge(configured("CorrectnessGrader", **keys)), "42")
        assert "What is 40 + 2?" in server.seen[0][1]["messages"][-1]["content"]
        assert server.seen[0][1]["model"] == "big"
    assert (said.reward, said.is_success, said.notes["reason"]) == (0.75, True, "nearly")


@needs_openjudge
@pytest.mark.parametrize("answer", ["no idea", "{}", '{"reason": "?"}'])
def test_an_answer_of_the_model_without_a_score_is_no_score(answer: str) -> None:
    with helper(lambda _: answer) as server:
        keys = {"helper.model": "big", "helper.base_url": server.url, "min_score": 0, "max_score": 5}
        with pytest.raises(JudgeFault):
            graded(judge(configured("CorrectnessGrader", **keys)), "42")


@needs_openjudge
@pytest.mark.parametrize("model", ["big", "qwen-big"])
@pytest.mark.parametrize("answer", ["no idea", "{}", '{"reason": "?"}', '{"reason": "?", "score": "high"}', None])
def test_a_grader_that_takes_its_models_failure_for_a_zero_is_not_believed(model: str, answer: str | None) -> None:
    with helper(lambda _: (400, {}, {}) if answer is None else answer) as server:
        keys = {"helper.model": model, "helper.base_url": server.url, "min_score": 0, "max_score": 5}
        with pytest.raises(JudgeFault):
            graded(judge(configured("ResponseHelpfulnessGrader", **keys)), "42")


@needs_openjudge
def test_inputs_of_ones_own(odd: str) -> None:
    said = graded(judge(odd_config(odd, inputs={"wish": "{query} {task.answer}", "extra": "{answer}"})), "0.25")
    assert said.reward == 0.25 and said.notes["reason"] == "What is 40 + 2? 42 {'extra': '0.25'}"


@needs_openjudge
@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("raise", "KeyError: 'mine'"),
        ("error", "no opinion"),
        ("nan", r"gave the score nan, which is not from 0 to 1: set .*min_score and max_score"),
        ("7", "gave the score 7.0, which is not from 0 to 1"),
        ("exit", "the process of openjudge has ended"),
    ],
)
def test_a_grader_that_fails_gives_no_reward_and_grades_the_next_one(odd: str, answer: str, complaint: str) -> None:
    found = judge(odd_config(odd))
    with pytest.raises(JudgeFault, match=complaint):
        graded(found, answer)
    assert graded(found, "0.5").reward == 0.5


@needs_openjudge
@pytest.mark.parametrize(("answer", "same"), [("hang", True), ("block", False)])
def test_a_grader_that_hangs_ends_at_its_deadline(
    odd: str, answer: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that blocks its process is ended with it."""
    monkeypatch.setattr(openjudge, "ALIVE_S", 2.0 if answer == "block" else 60.0)
    found = judge(odd_config(odd, timeout=30))
    before = graded(found, "pid").notes["reason"]
    found._section.timeout = 0.5
    with pytest.raises(JudgeFault, match=r"OddGrader gave no score within 0.5 s"):
        graded(found, answer)
    found._section.timeout = 30
    assert (graded(found, "pid").notes["reason"] == before) is same


@needs_openjudge
def test_a_run_has_one_process(odd: str) -> None:
    config = odd_config(odd)
    pids = {graded(judge(config), "pid").notes["reason"] for _ in range(2)}
    assert len(pids) == 1


@needs_openjudge
@pytest.mark.parametrize(
    ("grader", "keys", "complaint"),
    [
        ("StringMatch", {}, r"no grader 'StringMatch'. Did you mean StringMatchGrader\?"),
        ("CodeExecutionGrader", {}, "runs code that the model wrote, and nothing confines it"),
        ("StringMatchGrader", {"options": {"algoritm": 1}}, "unexpected keyword argument 'algoritm'"),
        ("CorrectnessGrader", {}, "a helper model is needed and none is named"),
        ("odd->RankingGrader", {}, "it ranks answers"),
        ("nowhere->X", {}, "No module named 'nowhere'"),
    ],
)
def test_a_grader_that_cannot_be_built_is_explained(
    odd: str, grader: str, keys: dict[str, Any], complaint: str
) -> None:
    config = odd_config(odd, **keys)
    config.ajet.task_judge.openjudge.grader = grader
    with pytest.raises(ConfigError, match=complaint):
        judge(config)


@needs_openjudge
def test_a_parameter_without_a_value_is_named(odd: str) -> None:
    with pytest.raises(ConfigError, match=r"inputs: ToolCallAccuracyGrader needs '\w+'; it takes .*tool"):
        keys = {"helper.model": "big", "helper.base_url": "http://127.0.0.1:1"}
        judge(configured("ToolCallAccuracyGrader", **keys))


@needs_openjudge
@pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])
def test_episodes_are_graded(tmp_path: Path, wrapper: str) -> None:
    assert play(tmp_path, "42", wrapper).reward == 1.0
    assert play(tmp_path, "41", wrapper).reward == 0.0


@needs_openjudge
def test_a_failing_grader_is_a_judge_error(tmp_path: Path, odd: str) -> None:
    section = odd_config(odd).ajet.task_judge.openjudge
    failed = play(tmp_path, "raise", "asyncio", grader=section.grader, python=section.python)
    assert failed.status is EpisodeStatus.JUDGE_ERROR and failed.reward is None
    assert failed.failure is not None and "KeyError: 'mine'" in failed.failure.message


def play(folder: Path, reply: str, wrapper: str, **keys: Any) -> Episode:
    (folder / "agent.py").write_text(
        textwrap.dedent("""
        from ajet import Workflow, WorkflowOutput

        class Agent(Workflow):
            async def execute(self, workflow_task, tuner):
                client = tuner.as_raw_openai_sdk_client()
                messages = [{"role": "user", "content": workflow_task.task.main_query}]
                completion = await client.chat.completions.create(model="any", messages=messages)
                return WorkflowOutput(metadata={"final_answer": completion.choices[0].message.content})
        """)
    )
    (folder / "replies.yaml").write_text(json.dumps([reply]))
    grader = {"grader": "StringMatchGrader", "python": PYTHON, **keys}
    config = {
        "task_reader": {"type": "random_dummy"},
        "rollout": {
            "user_workflow": "agent.py->Agent",
            "engine": "scripted",
            "scripted_replies": "replies.yaml",
            "compute_madness_checklist": [],
        },
        "task_judge": {"judge_type": "composite", "parts": {"match": {"judge": "openjudge", "openjudge": grader}}},
        "task_runner": {"wrapper_type": wrapper},
    }
    (folder / "run.yaml").write_text(json.dumps({"ajet": config}))
    with Runtime(load_config(folder / "run.yaml", backbone="debug")) as runtime:
        return runtime.run(runtime.pool.run_episode(Task(task_id="t", main_query="?", metadata={"answer": "42"})))


def test_an_interpreter_without_the_package_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"can't load py-openjudge: .*No module named 'openjudge'[^$]*\.python: "):
        judge(configured("StringMatchGrader", python=sys.executable))


def test_an_interpreter_that_is_not_there_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"openjudge\.python: there is no program /nowhere"):
        load_judge(configured("StringMatchGrader", python="/nowhere"))


def test_a_missing_grader_and_a_wrong_scale_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"openjudge\.grader: name a grader"):
        load_judge(configured(""))
    with pytest.raises(ConfigError, match=r"inputs\.wish: unknown placeholder \{qery\}; did you mean \{query\}"):
        load_judge(configured("X", inputs={"wish": "{qery}"}))


SLOW = """
import asyncio

class Score:
    error, reason = None, ""
    def __init__(self, score):
        self.score = score

class SlowGrader:
    mode = "pointwise"
    async def aevaluate(self, **given):
        return await self._aevaluate(**given)
    async def _aevaluate(self, response):
        await asyncio.sleep(float(response))
        return Score(float(response))
"""


def test_the_time_for_a_grade_begins_with_its_turn(tmp_path: Path) -> None:
    """With a stand-in for the package: several wait for the one that is graded."""
    (tmp_path / "openjudge.py").touch()
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    inputs = {"response": "{answer}"}
    keys = {"python": str(tmp_path / "python"), "max_concurrent": 1, "timeout": 1.5, "inputs": inputs}
    found = judge(configured("slow->SlowGrader", **keys))

    async def grade(*answers: str) -> list[Any]:
        asked = [found.compute_group_rewards([episode(answer)]) for answer in answers]
        return await asyncio.gather(*asked, return_exceptions=True)

    rewards = [validate_reward(said[0]).reward for said in asyncio.run(grade("0.5", "0.6", "0.7", "0.8"))]
    assert rewards == [0.5, 0.6, 0.7, 0.8]
    (fault,) = asyncio.run(grade("30"))
    assert isinstance(fault, JudgeFault) and "gave no score within 1.5 s" in str(fault)
