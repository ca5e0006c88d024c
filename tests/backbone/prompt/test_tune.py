"""`ajet tune`, `Trainer(algorithm="apo")`, and which versions episodes record where weights are trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ajet import PromptTemplate, Trainer, rollout
from ajet.backbone.prompt.journal import read_best
from ajet.backbone.trainer_api import RunFailedError
from ajet.cli.main import main
from ajet.config import load_config
from ajet.observe.episode_store import EpisodeStore
from ajet.prompt_tuning import Request
from ajet.schema.episode import Episode
from ajet.schema.resources import read_prompts
from support.call_trees import weights_version
from support.searchers import HERE, project

TRAINING = {
    "rollout__num_repeat": 2,
    "data__train_batch_size": 2,
    "trainer_common": {"total_training_steps": 1, "test_freq": -1, "use_kl_loss": False, "logger": ["file"]},
    "prompt_tuning__rounds": 1,
}


def episodes(folder: Path) -> list[Episode]:
    store = EpisodeStore(folder / "episodes.sqlite")
    try:
        return [one.episode for one in store.all()]
    finally:
        store.close()


def test_one_command_searches_then_trains_with_the_best(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    conf = project(tmp_path, tasks=8, **TRAINING, prompt_tuning__templates={"solver": r"Solve 😀 for \${question}"})
    assert main(["tune", str(conf), "--rounds", "2"]) in (0, 1)  # 1: equal rewards, nothing was trained
    said = capsys.readouterr().out
    runs = tmp_path / "saved_experiments"
    best = read_best(runs / "x-1-prompt")
    assert "Solve 😀 for ${question}" in best["templates"]["solver"]["text"]
    trained = episodes(runs / "x-1")
    assert trained and {episode.prompt_version for episode in trained} == {best["version"]}
    assert {weights_version(episode) for episode in trained} == {0}
    assert "search: saved_experiments/x-1-prompt" in said and "training: saved_experiments/x-1" in said
    assert "without effect" not in caplog.text, "each stage has its keys"
    capsys.readouterr()
    assert main(["export", "prompt", "x-1-prompt", "best.yaml"]) == 0
    templates = load_config("best.yaml", complete=False).ajet.prompt_tuning.templates
    assert read_prompts(templates).version == best["version"], "what is exported means the same"


@pytest.mark.slow
def test_the_second_round_begins_with_the_weights_and_templates_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    training = {**TRAINING, "trainer_common": {**TRAINING["trainer_common"], "total_training_steps": 2}}
    conf = project(tmp_path, tasks=8, **{**training, "rollout__user_workflow": f"{HERE}->Learner"})
    config = json.loads(conf.read_text())
    config["ajet"]["rollout"]["num_repeat"] = 4
    conf.write_text(json.dumps(config))
    assert main(["tune", str(conf), "--rounds", "2"]) == 0, capsys.readouterr()
    runs = tmp_path / "saved_experiments"
    searches, trainings = ([runs / f"x-{number}{kind}" for number in (1, 2)] for kind in ("-prompt", ""))
    bests = [read_best(search) for search in searches]
    versions = ["f77926e8", *(best["version"] for best in bests)]
    assert versions[1] != versions[0], "the first search found something"
    for number in (0, 1):
        history = (searches[number] / "prompts/history.jsonl").read_text().splitlines()
        assert json.loads(history[0])["version"] == versions[number], "a search begins with the best template so far"
        tried = {json.loads(line)["version"] for line in history if '"event": "candidate"' in line}
        searched, trained = episodes(searches[number]), episodes(trainings[number])
        assert {episode.prompt_version for episode in searched} <= tried
        assert {weights_version(episode) for episode in searched} == {0}
        assert {episode.prompt_version for episode in trained} == {versions[number + 1]}
        assert {weights_version(episode) for episode in trained} == {0, 1}
    hf = (trainings[0] / "hf").resolve()
    for folder in (searches[1], trainings[1]):
        resolved = yaml.safe_load((folder / "config.resolved.yaml").read_text())
        assert resolved["ajet"]["model"]["path"] == str(hf)
    assert weights(trainings[1] / "hf") != weights(hf), "the second training went on from there"
    capsys.readouterr()
    assert main(["tune", str(conf), "--rounds", "2"]) == 0
    assert capsys.readouterr().out.count("is complete") == 4


def weights(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))


def test_a_complete_search_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    conf = project(tmp_path, tasks=8, **TRAINING)
    main(["tune", str(conf)])
    before = (tmp_path / "saved_experiments/x-prompt/prompts/history.jsonl").read_bytes()
    capsys.readouterr()
    main(["tune", str(conf)])
    assert "saved_experiments/x-prompt is complete" in capsys.readouterr().out
    assert (tmp_path / "saved_experiments/x-prompt/prompts/history.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rounds", "0"], "write a whole number, at least 1"),
        (["rollout.temperature=0"], "nothing would be learnt"),
        (["prompt_tuning.algorithm=ap"], "did you mean `apo`?"),
        (["experiment_dir=here"], "makes several folders"),
    ],
)
def test_what_would_end_a_later_stage_is_told_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", str(project(tmp_path, tasks=8, **TRAINING)), *arguments]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "saved_experiments").exists()


@rollout
async def solver(task: dict[str, str], prompt_template: PromptTemplate) -> float:
    return float("because" in prompt_template.format(question=task["question"]))


def reason(request: Request) -> str:
    return f"{request.candidate.texts['prompt_template']} because"


@pytest.mark.parametrize("keywords", [{"backbone": "prompt", "algorithm": "best_of"}, {"algorithm": "best_of"}])
def test_a_search_from_python(tmp_path: Path, keywords: dict[str, str]) -> None:
    small = {"rollout": {"max_model_len": 256}, "data": {"max_prompt_length": 128, "max_response_length": 64}}
    trainer = Trainer(
        {**small, "prompt_tuning.proposer": reason, "prompt_tuning.rounds": 1},
        model="tiny:qwen2",
        prompt_template="Why {question}?",
        exp_dir=tmp_path,
        quiet=True,
        **keywords,
    )
    run = trainer.fit(solver, [{"question": f"{number}"} for number in range(8)])
    assert run.path.name == "solver-prompt"
    assert run.prompts["prompt_template"].template == "Why {question}? because"
    assert run.metrics[-1]["val/return/mean"] == 1.0


def test_templates_of_the_yaml_have_a_version_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    conf = project(tmp_path, tasks=4)
    assert main(["--conf", str(conf), "--backbone=debug", "--quiet"]) == 0
    recorded = episodes(tmp_path / "saved_experiments/x-debug")
    assert {episode.prompt_version for episode in recorded} == {"f77926e8"}
    assert all(episode.prompts_used == ["solver"] for episode in recorded)
    config = json.loads(conf.read_text())
    assert config["ajet"]["prompt_tuning"]["templates"] == {"solver": "Solve: {question}"}


@rollout
async def fails(task: dict[str, str], prompt_template: PromptTemplate) -> float:
    return float(task["no such field"])


def proposes_nonsense(request: Request) -> str:
    raise ValueError("my proposer's own mistake")


@pytest.mark.parametrize(
    ("agent", "proposer", "keys", "says"),
    [
        (fails, reason, {}, r"KeyError: 'no such field'.*test_tune\.py"),
        (solver, proposes_nonsense, {}, r"my proposer's own mistake"),
        (solver, "helper", {"helper": {"model": "m", "base_url": "http://127.0.0.1:9/v1"}}, r"127\.0\.0\.1:9"),
    ],
    ids=["a raising agent", "a raising proposer", "a dead helper"],
)
def test_a_quiet_search_that_fails_carries_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: Any, proposer: Any, keys: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr("ajet.task_judge.helper.MAX_RETRIES", 0)
    small = {"rollout": {"max_model_len": 256}, "data": {"max_prompt_length": 128, "max_response_length": 64}}
    trainer = Trainer(
        {**small, **keys, "prompt_tuning.proposer": proposer, "prompt_tuning.rounds": 1},
        model="tiny:qwen2",
        prompt_template="Why {question}?",
        algorithm="best_of",
        exp_dir=tmp_path,
        quiet=True,
    )
    with pytest.raises(RunFailedError, match=re.compile(says, re.DOTALL)):
        trainer.fit(agent, [{"question": f"{number}"} for number in range(8)])
