"""`--backbone=prompt`, end to end on a tiny model: real episodes, real files, the real command."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from ajet.backbone import LaunchOptions
from ajet.backbone.prompt import run
from ajet.backbone.prompt.journal import PromptJournal, read_best, read_history
from ajet.cli.main import main
from ajet.config import load_config
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.metrics import read_metrics
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.run_files import is_complete
from ajet.prompt_tuning.proposal import Candidate, ProposerError, SearchFailedError, UnusedTemplateError
from ajet.prompt_tuning.trial import Purpose, Score
from ajet.schema.errors import ConfigError, UserError
from ajet.schema.resources import PromptSet, PromptTemplate
from support.call_trees import weights_version
from support.searchers import HERE, project


def tuned(conf: Path, *overrides: str, fresh: bool = False) -> Path:
    """One run; returns its folder."""
    config = load_config(conf, overrides, backbone="prompt")
    config.ajet.backbone = "prompt"
    with ExperimentFolder.open(
        config, exp_dir=conf.parent / "runs", source_yaml=conf, backbone="prompt", fresh=fresh
    ) as experiment:
        try:
            code = run(config, experiment, LaunchOptions(quiet=True))
        except UserError:
            experiment.withdraw()  # as the command does
            raise
        assert code == 0
        return experiment.path


def history(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "prompts/history.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def recorded(folder: Path) -> set[str]:
    return {one.episode.episode_id for one in EpisodeStore(folder / "episodes.sqlite").all()}


@pytest.mark.parametrize("algorithm", ["best_of", "apo", "gepa"])
def test_finds_better_templates_and_keeps_what_led_to_them(tmp_path: Path, algorithm: str) -> None:
    if algorithm == "gepa":
        pytest.importorskip("gepa")
    folder = tuned(project(tmp_path, algorithm=algorithm))
    assert folder.name == "x-prompt", "a run that trains the same YAML has its own folder"
    best = read_best(folder)
    assert best["score"] > 0 and "{question}" in best["templates"]["solver"]["text"]
    assert {"before", "after", "low", "high", "p", "within_noise"} <= best["confirmed"].keys()
    steps = read_metrics(folder / "metrics.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert ["time/step" in step for step in steps] == [False, True, True], "by which the time left is told"
    assert steps[-1]["val/return/mean"] == best["score"] > steps[0]["val/return/mean"]
    assert steps[-1]["prompt/episodes"] > steps[0]["prompt/episodes"] > 0
    store = EpisodeStore(folder / "episodes.sqlite")
    try:
        recorded = {one.episode.episode_id: one.episode for one in store.all()}
    finally:
        store.close()
    versions = {one["id"]: one["version"] for one in history(folder, "candidate")}
    for scores in history(folder, "scores"):
        for trial in scores["trials"]:
            (name,) = trial["episodes"]
            assert recorded[name].task_id == trial["task"] and recorded[name].reward == trial["reward"]
            assert recorded[name].prompt_version == versions[scores["candidate"]]
            assert recorded[name].prompts_used == ["solver"] and weights_version(recorded[name]) is not None
    spent = history(folder, "round")[-1]["spent"]
    confirmed = [one for one in history(folder, "scores") if one["purpose"] == "confirmation"]
    assert spent["episodes"] + sum(len(one["trials"]) for one in confirmed) == len(recorded)
    started = history(folder, "started")[0]
    seen = {trial["task"] for one in history(folder, "scores") if one not in confirmed for trial in one["trials"]}
    assert not seen & set(started["tasks"]["confirmation"])


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["asyncio", "multi-processing"])
def test_a_candidate_reaches_threads_and_processes_alike(tmp_path: Path, wrapper: str) -> None:
    folder = tuned(project(tmp_path, tasks=8, task_runner__wrapper_type=wrapper, prompt_tuning__rounds=1))
    assert read_best(folder)["score"] > 0


@pytest.mark.slow
def test_a_template_that_kills_its_worker_scores_zero(tmp_path: Path) -> None:
    """Isolated episodes survive whatever a proposal makes the workflow do."""
    conf = project(tmp_path, tasks=8, task_runner__wrapper_type="multi-processing", prompt_tuning__rounds=1)
    folder = tuned(conf, "prompt_tuning.templates.solver=kill {question}")
    failures = [trial for one in history(folder, "scores") for trial in one["trials"] if "failure" in trial]
    assert all(trial["task"] == "t3" and "SIGKILL" in trial["failure"] for trial in failures)


@pytest.mark.slow
def test_a_search_that_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = tuned(project(tmp_path / "whole", algorithm="apo", prompt_tuning__rounds=3))
    conf = project(tmp_path / "parts", algorithm="apo", prompt_tuning__rounds=1)
    parts = tuned(conf)
    tuned(conf, "prompt_tuning.rounds=3")

    def found(folder: Path) -> list[Any]:
        return [(one["id"], one["templates"], one["parents"]) for one in history(folder, "candidate")]

    assert found(parts) == found(whole)
    assert read_best(parts)["templates"] == read_best(whole)["templates"]
    assert [step["step"] for step in read_metrics(parts / "metrics.jsonl")] == [0, 1, 2, 3]


def test_what_is_left_of_a_killed_round_is_dropped(tmp_path: Path) -> None:
    conf = project(tmp_path, prompt_tuning__rounds=1)
    folder = tuned(conf)
    file = folder / "prompts/history.jsonl"
    whole = file.read_text()
    spent = {**history(folder, "ended")[0]["spent"], "episodes": 100}
    file.write_text(whole + json.dumps({"event": "scores", "purpose": "batch", "spent": spent}) + '\n{"event": "cand')
    (folder / "prompts/best.yaml").write_text("damaged: [")
    kept = read_history(file)
    assert kept.size == len(whole.encode()) and kept.earlier.round == 1
    tuned(conf, "prompt_tuning.rounds=2")
    assert file.read_text().startswith(whole)
    assert history(folder, "round")[-1]["spent"]["episodes"] > 100, "what a killed round took is spent"
    assert read_best(folder)["candidate"].startswith("c")


@pytest.mark.parametrize("lost", ["ended", "confirmed"])
def test_a_run_that_was_cut_off_at_its_end_is_finished_by_the_same_command(tmp_path: Path, lost: str) -> None:
    conf = project(tmp_path, prompt_tuning__rounds=1)
    folder = tuned(conf)
    found = read_best(folder)
    assert "confirmed" in found
    for file, lines in (("events.jsonl", 1), ("prompts/history.jsonl", int(lost == "confirmed"))):
        kept = (folder / file).read_text().splitlines(keepends=True)
        (folder / file).write_text("".join(kept[: len(kept) - lines]))
    spent = history(folder, "scores")[-1]["spent"]["episodes"]
    tuned(conf)
    assert is_complete(folder) and read_best(folder) == found
    assert history(folder, "ended")[-1]["spent"]["episodes"] == spent == len(recorded(folder)), "nothing was run again"
    with pytest.raises(ConfigError, match="is complete: all rounds were run"):
        tuned(conf)


def test_episodes_that_count_are_recorded_when_their_round_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, write = PromptJournal.commit, EpisodeRecorder._write
    missing = []

    def look_and_commit(journal: PromptJournal, event: str, **fields: Any) -> None:
        folder = journal.folder.parent
        named = [name for one in history(folder, "scores") for trial in one["trials"] for name in trial["episodes"]]
        missing.append(set(named) - recorded(folder))
        commit(journal, event, **fields)

    def write_late(recorder: EpisodeRecorder, *work: Any) -> Any:
        time.sleep(0.05)
        return write(recorder, *work)

    monkeypatch.setattr(PromptJournal, "commit", look_and_commit)
    monkeypatch.setattr(EpisodeRecorder, "_write", write_late)
    tuned(project(tmp_path, prompt_tuning__rounds=1))
    assert missing == [set(), set(), set()]


def test_a_search_that_goes_on_counts_what_it_spent_and_drops_what_it_could_not_try(tmp_path: Path) -> None:
    start, proposals, kept = 4, 4 * 4, 2 * 4
    conf = project(tmp_path, prompt_tuning__rounds=3)
    budget = f"prompt_tuning.budget.episodes={start + proposals + 3 + kept}"
    folder = tuned(conf, budget)
    assert [one["round"] for one in history(folder, "candidate")][-1] == 2, "proposed, and too many for what was left"
    tuned(conf)
    run = sum(len(score["trials"]) for score in history(folder, "scores"))
    assert history(folder, "ended")[-1]["spent"]["episodes"] == run
    found = [candidate.id for candidate in read_history(folder / "prompts/history.jsonl").earlier.candidates]
    assert len(found) == len(set(found))


def test_resuming_with_other_templates_algorithm_or_tasks_is_refused(tmp_path: Path) -> None:
    conf = project(tmp_path, tasks=8, prompt_tuning__rounds=1)
    folder = tuned(conf)
    before = (folder / "prompts/history.jsonl").read_bytes()
    for overrides, why in (
        (["prompt_tuning.templates.solver=Other {question}", "prompt_tuning.rounds=2"], "began with other templates"),
        (["prompt_tuning.algorithm=apo"], r"prompt_tuning.algorithm: .* began with 'best_of', now it is 'apo'"),
        (["prompt_tuning.confirmation_tasks=1"], "confirmation_tasks"),
        (["task_reader.seed=7", "prompt_tuning.rounds=2"], "began with other tasks"),
        ([], "is complete: all rounds were run"),
    ):
        with pytest.raises(ConfigError, match=why):
            tuned(conf, *overrides)
    tasks = tmp_path / "tasks.jsonl"
    kept = tasks.read_text()
    tasks.write_text(kept.replace("Task 3", "Another task"))
    with pytest.raises(ConfigError, match="began with other tasks"):
        tuned(conf, "prompt_tuning.rounds=2")
    tasks.write_text(kept)
    assert (folder / "prompts/history.jsonl").read_bytes() == before
    again = tuned(conf, "prompt_tuning.templates.solver=Other {question}", fresh=True)
    assert read_best(again)["score"] > 0


@pytest.mark.parametrize(
    ("keys", "error", "why"),
    [
        ({"rollout__user_workflow": f"{HERE}->Deaf"}, UnusedTemplateError, r"no episode used template 'solver'"),
        ({"rollout__user_workflow": f"{HERE}->Broken"}, SearchFailedError, r"all 2 tasks failed.*KeyError"),
        ({"prompt_tuning__proposer": f"{HERE}->dead"}, ProposerError, r"all 4 questions.*nobody listens"),
        ({"prompt_tuning__budget": {"episodes": 5}}, ConfigError, r"write at least 8"),
        (
            {"prompt_tuning__budget": {"seconds": 1e-6}},
            SearchFailedError,
            r"budget.seconds: .*before the first templates",
        ),
        ({"prompt_tuning__templates": {"solver": "{question"}}, ConfigError, r"templates.solver: .*\{\{ and \}\}"),
        ({"prompt_tuning__proposer": f"{HERE}->propos"}, ConfigError, r"prompt_tuning.proposer: .*'propose'"),
        ({"prompt_tuning__algorithm": f"{HERE}->propose"}, ConfigError, r"is not an algorithm: it needs `rounds`"),
        ({"prompt_tuning__confirmation_tasks": 4}, ConfigError, r"none is left to validate"),
    ],
    ids=["unused", "fails", "dead", "budget", "seconds", "template", "proposer", "algorithm", "confirmation"],
)
def test_what_is_wrong_is_named(tmp_path: Path, keys: dict[str, Any], error: type[Exception], why: str) -> None:
    expected = UserError if error is ConfigError else error
    with pytest.raises(expected, match=why):
        tuned(project(tmp_path, tasks=8, **keys))


@pytest.mark.parametrize("text", ["a\x85b", "a\n\x85b\n", " a\u2028\n\nb ", "\t{x}\r\n", "# {{a}}: ü会\n"])
def test_the_best_templates_are_read_as_they_were_found(tmp_path: Path, text: str) -> None:
    journal = PromptJournal(tmp_path)
    journal.resume()
    candidate = Candidate("c0", PromptSet({"solver": PromptTemplate(text)}))
    journal.keep_best(candidate, Score("c0", Purpose.VALIDATION))
    journal.commit("round")
    journal.close()
    assert read_best(tmp_path)["templates"]["solver"]["text"] == text


def test_nonsense_proposals_end_with_a_report_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    conf = project(tmp_path, tasks=8, prompt_tuning__proposer=f"{HERE}->nonsense", prompt_tuning__rounds=9)
    assert main(["--conf", str(conf), "--backbone=prompt"]) == 1
    said = capsys.readouterr()
    assert "3 rounds in a row, every proposal was refused" in said.out
    assert "none of 0 proposals was better" in said.out and "lacks the placeholder {question}" in said.out
    assert said.err == "", "the report has said it"
    (events,) = tmp_path.rglob("events.jsonl")
    last = json.loads(events.read_text().splitlines()[-1])
    assert last["error"].startswith("no proposal could be tried: ") and "lacks the placeholder" in last["error"]


def test_the_terminal_says_round_best_and_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    conf = project(tmp_path, tasks=8, prompt_tuning__budget={"episodes": 30}, prompt_tuning__rounds=9)
    assert main(["validate", str(conf), "--backbone=prompt"]) == 0
    said = capsys.readouterr().out
    assert "4 to search with, 2 to validate, 2 to confirm" in said and "budget: 30 episodes" in said
    assert main(["--conf", str(conf), "--backbone=prompt"]) == 0
    said = capsys.readouterr().out
    assert "start: 0.000 on 2 validation tasks" in said
    assert "x-prompt (prompt, 9 rounds)" in said and "step" not in said
    assert re.search(r"^round 1/9  return .*\n  best c\d 0\.\d+ · .*left: 16 episodes$", said, re.MULTILINE)
    assert "ended      budget.episodes: 26 of 30 were run (4 are kept for the confirmation)" in said
    assert "confirmed  0.000 → " in said and "2 unseen tasks" in said and "within noise" in said
    assert main(["export", "prompt", "x-prompt"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert "{question}" in printed["ajet"]["prompt_tuning"]["templates"]["solver"]["text"]
    assert main(["export", "prompt", "x-prompt", "best.yaml"]) == 0
    assert yaml.safe_load((tmp_path / "best.yaml").read_text()) == printed
    assert main(["export", "prompt", "x-prompt", "best.yaml"]) == 2
    os.mkfifo("pipe")
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(Path("pipe").read_text)
        assert main(["export", "prompt", "x-prompt", "pipe"]) == 0
        assert yaml.safe_load(read.result()) == printed
    assert Path("pipe").is_fifo(), "a pipe or a device is written to, and stays"


def test_the_tuned_model_may_propose_itself(tmp_path: Path) -> None:
    """A tiny model can't write templates: that it is asked, counted and refused is what this shows."""
    conf = project(tmp_path, tasks=8, prompt_tuning__proposer="tuned", prompt_tuning__proposal_retries=0)
    config = load_config(conf, ["prompt_tuning.rounds=1"], backbone="prompt")
    config.ajet.backbone = "prompt"
    with ExperimentFolder.open(config, exp_dir=tmp_path / "runs", source_yaml=conf, backbone="prompt") as experiment:
        run(config, experiment, LaunchOptions(quiet=True))
        spent = history(experiment.path, "round")[-1]["spent"]
    assert spent["questions"] == 4
    assert spent["proposer_prompt_tokens"] > 100 and spent["proposer_sampled_tokens"] > 0


@pytest.mark.slow
def test_nothing_that_trains_is_loaded(tmp_path: Path) -> None:
    import subprocess

    conf = project(tmp_path, tasks=8, prompt_tuning__rounds=1)
    program = (
        "import sys; from ajet.cli.main import main; "
        f"code = main(['--conf', {str(conf)!r}, '--backbone=prompt', '--quiet']); "
        "print(code, 'ajet.trainer.optimizer' in sys.modules, 'ajet.trainer.trainer' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.split()[-3:] == ["0", "False", "False"], done.stderr
