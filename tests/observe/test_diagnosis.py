"""Each fault by the figures and episodes that show it, and what looks like one and isn't; and `ajet diagnose`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet.cli.main import main
from ajet.config import Config
from ajet.observe.diagnosis import EXPLAINS, diagnose, in_order
from ajet.observe.episode_codec import conversation
from ajet.observe.episode_store import EpisodeStore
from ajet.observe.experiment import ExperimentFolder
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.run_evidence import Figures, RunEvidence, RunFinding
from ajet.schema.episode import Episode, EpisodeStatus, Failure, Outcome
from support import ROOT
from support.synthetic_run import Vocabulary, math_episode, task_of

Change = Callable[[Episode, int, int], None]
"""Changes an episode of a step and repeat."""


def figures(steps: int = 12, **series: Callable[[int], float]) -> Figures:
    """The metrics of a run; `__` stands for a slash."""
    healthy: dict[str, Callable[[int], float]] = {
        "episode__count": lambda _: 64.0, "return__mean": lambda step: 0.3 + step / 40, "success__rate": lambda _: 0.4,
        "return__std": lambda _: 0.5, "credit__groups": lambda _: 8.0, "credit__zero_variance_groups": lambda _: 1.0,
        "episode__reply_length": lambda _: 20.0, "train__lr": lambda _: 1e-5, "train__grad_norm": lambda _: 0.3,
        "tokens__trained": lambda _: 900.0,
    }  # fmt: skip
    columns = {
        name.replace("__", "/"): [value(step) for step in range(steps)] for name, value in (healthy | series).items()
    }
    return Figures({"steps": list(range(steps)), "series": columns})


def config(**keys: Any) -> dict[str, Any]:
    """A resolved config; `__` stands for a dot."""
    root: dict[str, Any] = {}
    for name, value in ({"trainer_common__optim__lr": 3e-5} | keys).items():
        *path, last = name.split("__")
        block = root
        for part in path:
            block = block.setdefault(part, {})
        block[last] = value
    return {"ajet": root}


def faults(run: RunEvidence) -> list[str]:
    return [finding.fault for finding in diagnose(run) if finding.level in ("bad", "warn")]


def rising(low: float, high: float, steps: int = 12) -> Callable[[int], float]:
    return lambda step: low + (high - low) * step / (steps - 1)


@pytest.mark.parametrize(
    ("fault", "series", "keys"),
    [
        ("", {}, {}),
        ("judge_errors", {"status__judge_error": lambda _: 12.0}, {}),
        ("failures", {"episode__failed_share": lambda _: 0.3}, {}),
        ("sampler_gap", {"loss__sampler_gap_max": lambda _: 0.05}, {"model__dtype": "float32"}),
        ("", {"loss__sampler_gap_max": lambda _: 0.05}, {"model__dtype": "bfloat16"}),
        ("", {"loss__sampler_gap_max": lambda _: 0.05, "train__staleness__max": lambda _: 1.0},
         {"model__dtype": "float32"}),
        ("sampler_gap", {"loss__sampler_gap_max": lambda _: 0.3, "loss__sampler_kl": lambda _: 0.1}, {}),
        ("nothing_trained", {"train__lr": lambda _: 0.0}, {}),
        ("nothing_trained", {"tokens__trained": lambda _: 0.0}, {}),
        ("nothing_trained", {"train__grad_norm": lambda _: 0.0}, {}),
        ("staleness", {"train__staleness": lambda _: 3.5}, {"rollout__max_staleness": 6}),
        ("staleness",
         {"train__staleness": lambda _: 3.5, "return__mean": lambda _: 0.3, "train__kl": rising(0, 2)}, {}),
        ("", {"train__staleness": lambda _: 1.0}, {"rollout__max_staleness": 1}),
        ("kl_growth", {"train__kl": rising(0.0, 2.0), "return__mean": lambda _: 0.3}, {}),
        ("", {"train__kl": rising(0.0, 5.0)}, {}),
        ("", {"train__kl": lambda step: 0.4 if step == 1 else 0.1 * (step > 1), "return__mean": lambda _: 0.3}, {}),
        ("entropy_collapse", {"train__entropy": rising(0.8, 0.0), "return__mean": lambda _: 0.3}, {}),
        ("entropy_collapse", {"train__entropy": rising(6.0, 0.6), "return__mean": lambda _: 0.3}, {}),
        ("", {"train__entropy": rising(0.8, 0.0)}, {}),
        ("length_drift", {"episode__reply_length": rising(20, 60), "return__mean": lambda _: 0.3}, {}),
        ("", {"episode__reply_length": rising(20, 60)}, {}),
        ("no_variance", {"credit__zero_variance_groups": lambda _: 8.0}, {}),
        ("always_solved", {"credit__zero_variance_groups": lambda _: 8.0, "success__rate": lambda _: 1.0}, {}),
        ("", {"credit__zero_variance_groups": lambda _: 7.0, "success__rate": rising(0.2, 1.0)}, {}),
        ("validation_gap", {"val__return__mean": lambda _: 0.1, "val__return__std": lambda _: 0.2,
                            "val__episode__usable": lambda _: 64.0}, {}),
        ("reward_fell", {"return__mean": rising(0.8, 0.1)}, {}),
        ("dropped_tokens", {"ledger__captured": lambda _: 100.0, "ledger__dropped": lambda _: 30.0}, {}),
    ],
)  # fmt: skip
def test_what_metrics_show(fault: str, series: dict[str, Callable[[int], float]], keys: dict[str, Any]) -> None:
    assert faults(RunEvidence(figures(**series), config=config(**keys)))[:1] == ([fault] if fault else [])


def test_the_curriculum_is_no_advice_to_a_run_that_has_one() -> None:
    alike = figures(credit__zero_variance_groups=lambda _: 8.0)
    (found,) = diagnose(RunEvidence(alike, config=config()))
    assert "task_reader.curriculum.enabled: true" in found.change
    (found,) = diagnose(RunEvidence(alike, config=config(task_reader__curriculum__enabled=True)))
    assert "curriculum" not in found.change


def test_what_being_cut_costs_is_said_of_the_episodes_that_were_looked_at() -> None:
    cut, whole = [(f"cut {n}", "length", float(n == 0)) for n in range(4)], [(f"whole {n}", "", 1.0) for n in range(8)]
    rows = [
        {"episode_id": name, "outcomes": outcomes, "reward": reward, "success": None, "task_id": "", "group_id": ""}
        for name, outcomes, reward in (*cut, *whole)
    ]

    def said(steps: int) -> str:
        series = {"episode__count": lambda _: 12.0, "outcome__length": lambda _: 4.0, "success__rate": lambda _: 0.5}
        run = RunEvidence(figures(steps, **series), config=config())
        run.__dict__.update(early=rows, late=rows if steps == 1 else rows[2:])
        return next(one.text for one in diagnose(run) if one.fault == "cut_replies")

    assert said(1).endswith(" They earned 0.25, the others 1.")
    assert said(12).endswith(" They earned 0.25 in the first and last steps, the others 1.")


def test_the_key_to_change_and_its_new_value() -> None:
    found = diagnose(RunEvidence(figures(train__kl=rising(0.0, 2.0), return__mean=lambda _: 0.3), config=config()))
    assert found[0].level == "bad" and "trainer_common.optim.lr: 3e-05 → 1e-05" in found[0].change
    assert "from 0 to 2 per token" in found[0].text and found[0].evidence["steps"] == [0, 11]


def test_the_gravest_is_first() -> None:
    run = RunEvidence(figures(train__staleness=lambda _: 4.0, status__judge_error=lambda _: 30.0), config=config())
    assert faults(run) == ["judge_errors", "staleness"]


def test_a_cause_comes_before_what_follows_from_it_however_grave() -> None:
    falls = {"return__mean": rising(0.8, 0.0), "train__kl": rising(0.0, 3.0), "train__entropy": rising(0.8, 0.0)}
    found = diagnose(RunEvidence(figures(**falls, train__staleness=lambda _: 3.5), config=config()))
    assert [(one.fault, one.follows_from) for one in found] == [
        ("staleness", ""), ("kl_growth", "staleness"), ("entropy_collapse", "staleness"), ("reward_fell", "staleness"),
    ]  # fmt: skip
    found = diagnose(RunEvidence(figures(**falls), config=config()))
    assert [one.follows_from for one in found] == ["", "kl_growth", "kl_growth"] and found[0].fault == "kl_growth"


def test_a_loss_that_asks_for_less_entropy_explains_the_divergence() -> None:
    falls = {"return__mean": rising(0.8, 0.0), "train__kl": rising(0.0, 3.0), "train__entropy": rising(0.8, 0.0)}
    run = RunEvidence(figures(**falls), config=config(trainer_common__algorithm__entropy_coef=-0.5))
    found = diagnose(run)
    assert [one.fault for one in found] == ["entropy_collapse", "reward_fell"]
    assert found[0].change == "trainer_common.algorithm.entropy_coef: -0.5 → 0"


def test_a_loss_that_asks_for_less_entropy_is_bad_though_the_reward_rises() -> None:
    run = RunEvidence(
        figures(train__entropy=rising(6.0, 0.2), success__rate=lambda _: 0.0),
        config=config(trainer_common__algorithm__entropy_coef=-10.0),
    )
    assert [(one.fault, one.level) for one in diagnose(run)] == [("entropy_collapse", "bad")]


def test_training_explains_nothing_that_was_there_before_it() -> None:
    cut = RunFinding("warn", "cut_replies", "", from_start=True)
    kl = RunFinding("warn", "kl_growth", "")
    assert [one.follows_from for one in in_order([cut, kl])] == ["", ""]
    assert [one.follows_from for one in in_order([replace(cut, from_start=False), kl])] == ["", "kl_growth"]


def test_a_failed_episode_explains_its_dropped_tokens() -> None:
    found = [RunFinding("warn", "dropped_tokens", ""), RunFinding("bad", "cut_replies", "")]
    found.append(RunFinding("bad", "failures", ""))
    assert [(one.fault, one.follows_from) for one in in_order(found)][-1] == ("dropped_tokens", "failures")


def test_equal_rewards_of_a_model_that_says_the_same_each_time_are_not_blamed_on_the_reward() -> None:
    """It has risen to what it says now, so `entropy_collapse` is silent."""
    series: dict[str, Callable[[int], float]] = {
        "credit__zero_variance_groups": lambda _: 8.0,
        "return__mean": lambda step: 0.3 if step < 3 else 0.6,
    }
    collapsed = RunEvidence(figures(train__entropy=lambda step: 6.0 if step < 3 else 0.1, **series), config=config())
    (found,) = diagnose(collapsed)
    assert found.fault == "no_variance" and "the model says the same each time (entropy 6, now 0.1)" in found.text
    assert found.change.startswith("trainer_common.optim.lr: 3e-05 → 1e-05") and "num_repeat" not in found.change
    (found,) = diagnose(RunEvidence(figures(train__entropy=lambda _: 6.0, **series), config=config()))
    assert found.fault == "no_variance" and "entropy" not in found.text


def test_no_fault_explains_one_that_stands_before_it() -> None:
    causes = list(EXPLAINS)
    assert all(causes.index(cause) < causes.index(one) for cause in causes for one in EXPLAINS[cause] if one in causes)


def test_a_warning_of_the_log_is_no_fault() -> None:
    log = [
        {"level": "WARNING", "message": "slow"},
        {"level": "INFO", "message": "x"},
        {"level": "ERROR", "message": "no"},
    ]
    found = [one for one in diagnose(RunEvidence(figures(), log=log)) if one.fault == "logged"]
    assert [(one.level, one.text) for one in found] == [("warn", "no"), ("quiet", "slow")]


# ---------------------------------------------------------------- episodes


def recorded(folder: Path, change: Change, steps: int = 4, repeats: int = 8) -> EpisodeStore:
    """The episodes of four tasks, each changed."""
    vocabulary = Vocabulary()
    recorder = EpisodeRecorder(folder / "episodes.sqlite", tokenizer=vocabulary)
    for step in range(1, steps + 1):
        for task in range(4):
            for repeat in range(repeats):
                rng = random.Random(1000 * step + 10 * task + repeat)
                episode = math_episode(vocabulary, rng, task=task, step=step, repeat=repeat)
                episode.status, episode.failure, episode.outcomes = EpisodeStatus.COMPLETED, None, ()
                episode.reward, episode.is_success = float(repeat % 2), repeat % 2 == 1
                change(episode, step, repeat)
                recorder.record(episode, step, None, task=task_of(episode))
    recorder.close()
    return EpisodeStore(folder / "episodes.sqlite")


def unchanged(episode: Episode, step: int, repeat: int) -> None:
    pass


def earns(reward: float, success: bool | None) -> Change:
    def change(episode: Episode, step: int, repeat: int) -> None:
        episode.reward, episode.is_success = reward, success

    return change


def cut_at_the_end(episode: Episode, step: int, repeat: int) -> None:
    if repeat % 2 == 0:
        episode.status, episode.outcomes = EpisodeStatus.TRUNCATED, (Outcome.LENGTH,)


def all_cut(episode: Episode, step: int, repeat: int) -> None:
    episode.status, episode.outcomes = EpisodeStatus.TRUNCATED, (Outcome.LENGTH,)


def cut_with_one_lucky_guess(episode: Episode, step: int, repeat: int) -> None:
    all_cut(episode, step, repeat)
    lucky = episode.task_id.endswith("1") and step == 4 and repeat == 0
    episode.reward, episode.is_success = float(lucky), lucky


def unjudged(episode: Episode, step: int, repeat: int) -> None:
    if repeat < 2:
        episode.status, episode.reward, episode.is_success = EpisodeStatus.JUDGE_ERROR, None, None
        episode.failure = Failure("ValueError", "can't read '7'")


def tool_says(text: str) -> Change:
    def change(episode: Episode, step: int, repeat: int) -> None:
        for number, call in enumerate(episode.tree.calls):
            for asked in call.reply.get("tool_calls") or []:
                asked["function"]["arguments"] = f'{{"expression": "{step}+{repeat}+{number}"}}'
            for message in call.new_messages:
                if message["role"] == "tool":
                    message["content"] = text

    return change


def next_to_nothing_solved_and(other: Change) -> Change:
    def change(episode: Episode, step: int, repeat: int) -> None:
        other(episode, step, repeat)
        episode.is_success = episode.task_id.endswith("1") and step == 4 and repeat == 0  # one lucky guess

    return change


def paid_without_success(episode: Episode, step: int, repeat: int) -> None:
    episode.reward, episode.is_success = 1.0, repeat == 0


def a_few_cheat(episode: Episode, step: int, repeat: int) -> None:
    """Most earn nothing, and of those that are paid most have failed."""
    episode.reward, episode.is_success = float(repeat in (1, 2, 3)), repeat == 1


def nearly_all_paid_and_none_right(episode: Episode, step: int, repeat: int) -> None:
    episode.reward, episode.is_success = float(step > 1 or repeat > 0), False


def unbalanced(episode: Episode, step: int, repeat: int) -> None:
    episode.reward_parts = {"right": float(repeat % 2), "words": 10.0 * repeat}
    episode.reward_weights = {"right": 1.0, "words": 2.0}


def longer_and_longer(episode: Episode, step: int, repeat: int) -> None:
    """Paid by the token until all are long."""
    long = repeat % 2 == 0 if step == 1 else True
    run = episode.tree.runs[episode.tree.calls[0].run]
    run.ids = (np.arange(40 if long else 15) % 20).astype(np.int32)
    episode.tree.calls[0].mask = np.ones(len(run.ids), np.bool_)
    episode.tree.calls[0].logprobs = np.zeros(len(run.ids), np.float32)
    episode.reward, episode.is_success = float(long), None


def in_circles(episode: Episode, step: int, repeat: int) -> None:
    run = episode.tree.runs[episode.tree.calls[0].run]
    run.ids[:] = run.ids[0]


SOME: dict[str, Callable[[int], float]] = {"success__rate": lambda _: 0.5}
ALIKE: dict[str, Callable[[int], float]] = {"credit__zero_variance_groups": lambda _: 8.0}


@pytest.mark.parametrize(
    ("fault", "change", "series"),
    [
        ("", unchanged, SOME),
        ("judge_errors", unjudged, SOME | {"status__judge_error": lambda _: 16.0}),
        ("cut_replies", cut_at_the_end, SOME | {"outcome__length": lambda _: 32.0}),
        ("", all_cut, SOME | {"outcome__length": lambda _: 64.0}),
        ("cut_replies", cut_with_one_lucky_guess,
         ALIKE | {"success__rate": lambda _: 0.01, "outcome__length": lambda _: 64.0}),
        ("dead_tool", tool_says("Error: connection refused"), SOME),
        ("dead_tool", tool_says("calculator failed: ConnectionRefusedError: no"), SOME),
        ("dead_tool", tool_says("requests.HTTPError: 500"), SOME),
        ("dead_tool", tool_says("HTTP/1.1 503 Service Unavailable"), SOME),
        ("", tool_says("Status: 1450 parcels are on their way"), SOME),
        ("dead_tool", tool_says('{"error": {"code": 401}, "request_id": "7"}'), SOME),
        ("", tool_says('{"error": null, "value": 7}'), SOME),
        ("", tool_says('{"error": "", "value": 7}'), SOME),
        ("", tool_says('{"errors": [], "data": {"value": 7}}'), SOME),
        ("dead_tool", tool_says('{"errors": ["no such field"]}'), SOME),
        ("", tool_says("Errors: 0, warnings: 2"), SOME),
        ("", tool_says("error_rate 0.3"), SOME),
        ("dead_tool", tool_says('{"status": 429, "retry_after": 17}'), SOME),
        ("", tool_says('{"status": 200, "value": 429}'), SOME),
        ("dead_tool", next_to_nothing_solved_and(tool_says("<html><title>502 Bad Gateway</title></html>")), SOME),
        ("dead_tool", next_to_nothing_solved_and(tool_says("The service is unavailable (request 81).")), SOME),
        ("dead_tool", next_to_nothing_solved_and(tool_says("no answer: the connection timed out")), SOME),
        ("", tool_says("Item unavailable"), SOME),
        ("", tool_says("A page about quota exceeded and access denied. " * 10), SOME),
        ("dead_tool", next_to_nothing_solved_and(tool_says("0")), SOME),
        ("", tool_says("done"), SOME),
        ("gaming", paid_without_success, SOME),
        ("gaming", a_few_cheat, SOME),
        ("gaming", nearly_all_paid_and_none_right,
         ALIKE | {"success__rate": lambda _: 0.0, "return__mean": lambda _: 1.0}),
        ("no_variance", earns(1.0, False),
         ALIKE | {"success__rate": lambda _: 0.0, "return__mean": lambda _: 1.0}),
        ("part_dominates", unbalanced, SOME),
        ("repeated_replies", in_circles, SOME),
        ("length_drift", longer_and_longer, {"episode__reply_length": rising(20, 90)}),
        ("never_solved", earns(0.0, False), ALIKE | {"success__rate": lambda _: 0.0}),
        ("no_variance", earns(0.4, None), ALIKE | {"success__rate": lambda _: 0.0}),
    ],
)  # fmt: skip
def test_what_episodes_show(
    tmp_path: Path, fault: str, change: Change, series: dict[str, Callable[[int], float]]
) -> None:
    store = recorded(tmp_path, change)
    try:
        run = RunEvidence(figures(**series), store, config(rollout__max_response_length_in_one_turn=48))
        found = [one for one in diagnose(run) if one.level in ("bad", "warn")]
        assert [one.fault for one in found][:1] == ([fault] if fault else []), found
        for one in found[:1]:
            assert one.change and 1 <= len(one.episodes) <= 3 and all(map(store.has, one.episodes))
    finally:
        store.close()


def test_a_tool_call_counts_once_though_a_fork_sends_it_again(tmp_path: Path) -> None:
    """An agent that writes its own history: each model call begins a new conversation with all of it."""

    def forked(episode: Episode, step: int, repeat: int) -> None:
        tool_says("error: no")(episode, step, repeat)
        whole = [conversation(episode.tree, index) for index in range(len(episode.tree.calls))]
        for call, (*sent, said) in zip(episode.tree.calls, whole, strict=True):
            call.new_messages, call.extends, call.reply = sent, -1, {**said, "tool_calls": []}
        episode.tree.calls[0].new_messages = whole[-1]

    asked = 0
    for change in (tool_says("error: no"), forked):
        folder = tmp_path / str(asked)
        folder.mkdir()
        store = recorded(folder, change)
        (found,) = [one for one in diagnose(RunEvidence(figures(**SOME), store)) if one.fault == "dead_tool"]
        store.close()
        asked = asked or found.evidence["calls"]
        assert found.evidence["calls"] == asked and "the tool calculator ended in an error" in found.text


def test_what_was_cancelled_is_no_example_of_a_failure(tmp_path: Path) -> None:
    def change(episode: Episode, step: int, repeat: int) -> None:
        cancelled = repeat >= 4  # the newest: their group no longer needed them
        episode.status = EpisodeStatus.CANCELLED if cancelled else EpisodeStatus.WORKFLOW_ERROR
        episode.failure = Failure("EpisodeCancelled" if cancelled else "KeyError", "x")
        episode.reward = episode.is_success = None

    store = recorded(tmp_path, change, steps=1)
    found = [one for one in diagnose(RunEvidence(figures(0), store)) if one.fault == "failures"]
    assert [one.text for one in found] == [
        "100 % of the episodes failed, and count in no mean.", "16 of the recorded episodes failed with KeyError."
    ]  # fmt: skip
    assert all(store.get(name).episode.status is EpisodeStatus.WORKFLOW_ERROR for one in found for name in one.episodes)
    store.close()


# ---------------------------------------------------------------- the command


def write_run(root: Path, name: str, rows: Sequence[dict[str, float]]) -> Path:
    with ExperimentFolder.open(Config.model_validate({"ajet": {"experiment_name": name}}), exp_dir=root) as folder:
        for step, row in enumerate(rows, 1):
            folder.metrics.log(step, row)
    return folder.path


HEALTHY = {"episode/count": 8.0, "return/mean": 0.5, "credit/groups": 2.0, "credit/zero_variance_groups": 0.0}


def test_a_healthy_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(write_run(tmp_path, "fine", [HEALTHY] * 3))]) == 0
    assert capsys.readouterr().out == "fine: nothing wrong in 3 steps\n"


def test_episodes_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of an evaluation, of a debug run, or of a run whose metrics are lost."""
    folder = write_run(tmp_path, "played", [])
    recorded(folder, unchanged, steps=1, repeats=2).close()
    assert main(["diagnose", str(folder)]) == 0
    assert capsys.readouterr().out == "played: nothing wrong in 8 episodes; no training step is recorded\n"


def test_a_broken_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "saved_experiments", "stale", [HEALTHY | {"train/staleness": 3.0}] * 3)
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "stale"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("stale: 1 fault in 3 steps\n\nwarn   staleness\n")
    assert "evidence: train/staleness 3\n" in out and "change: rollout.max_staleness: 0 → 1" in out
    assert "ajet view stale, then /x/stale/charts?find=staleness" in out
    assert main(["diagnose", "stale", "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["run"], found["level"], found["fault"]) == ("stale", "warn", "staleness")


def test_what_cannot_be_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 2
    assert "no such run" in capsys.readouterr().err
    empty = write_run(tmp_path, "empty", [])
    assert main(["diagnose", str(empty)]) == 2
    assert "no step has ended" in capsys.readouterr().err
    damaged = write_run(tmp_path, "damaged", [HEALTHY])
    (damaged / "metrics.jsonl").write_text("not JSON\n")
    assert main(["diagnose", str(damaged)]) == 2
    assert "metrics.jsonl, line 1: not a step's metrics" in capsys.readouterr().err
    (damaged / "config.resolved.yaml").write_text("ajet: [\n")
    assert main(["diagnose", str(damaged)]) == 2
    assert capsys.readouterr().err.count("config.resolved.yaml:2: not YAML") == 1


@pytest.mark.slow
def test_the_page_shows_what_a_broken_run_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickstart, whose calculator fails; numbers and ids differ from run to run."""
    workflow = ROOT / "benchmarks" / "_diagnosis_faults.py"
    keys = ["experiment_name=broken", f"rollout.user_workflow={workflow}->Maths", "user.fault=tool fails"]
    keys += ["trainer_common.total_training_steps=4", "trainer_common.test_freq=0", "trainer_common.save_freq=0"]
    folder = tmp_path / "saved_experiments"
    monkeypatch.chdir(ROOT)
    assert main(["--conf", "configs/quickstart.yaml", "--quiet", "--exp-dir", str(folder), *keys]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["diagnose", "broken"]) == 1
    out = capsys.readouterr().out
    assert "next to no episode earns anything. It may follow from dead_tool." in " ".join(out.split())
    said = out.split("never_solved")[0]
    page = (ROOT / "docs" / "when_it_does_not_learn.md").read_text()
    shown = page.partition("$ ajet diagnose broken\n")[2].split("never_solved")[0]
    varying = re.compile(r"[0-9a-f]{32}|[0-9]+")
    assert varying.sub("*", said) == varying.sub("*", shown)
