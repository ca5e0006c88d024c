"""The games of the tutorials: their rules, their data, and an episode of each with scripted replies."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ajet.config import load_config
from ajet.engine.model_source import ModelSource
from ajet.engine.scripted import ScriptedCall, ScriptedEngine
from ajet.observe.episode_store import EpisodeStore
from ajet.schema.episode import Episode
from ajet.schema.task import Task
from ajet.task_runner.runtime import Runtime
from support.tutorial_runs import train

ROOT = Path(__file__).parents[2]
COUNTDOWN = ROOT / "tutorial" / "example_countdown"
LAKE = ROOT / "tutorial" / "example_frozenlake"


def module(path: Path) -> Any:
    """A tutorial's file; its neighbours can be imported by it as in a run."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def play(monkeypatch: pytest.MonkeyPatch, conf: Path, task: Task, *replies: str) -> Episode:
    monkeypatch.chdir(ROOT)
    config = load_config(conf, ["model.path=tiny:qwen2-0.3m"])

    def says(call: ScriptedCall) -> object:
        return replies[min(call.index, len(replies) - 1)]

    engine = ScriptedEngine(says, lambda: ModelSource.resolve("tiny:qwen2-0.3m").tokenizer())
    with Runtime(config, make_engine=lambda _: engine) as runtime:
        return runtime.run(runtime.pool.run_episode(task))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*7", 21),
        (" 7-3 ", 4),
        ("(3)+7", 10),
        ("3+3", None),  # 7 is not used
        ("3*7*7", None),
        ("37", None),
        ("7/3", None),
        ("3**7", None),
        ("-3+7", None),
        ("True*7", None),
        ("__import__('os')", None),
        ("3 +", None),
        ("", None),
        ("(" * 5000, None),
        ("3+" * 60 + "7", None),
    ],
)
def test_only_expressions_of_the_given_numbers_count(expression: str, value: int | None) -> None:
    assert module(COUNTDOWN / "countdown.py").makes(expression, [3, 7]) == value


def test_a_countdown_is_one_conversation_and_later_tries_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(task_id="t", main_query="x", metadata={"numbers": [3, 7], "target": 21})
    solved = play(monkeypatch, COUNTDOWN / "countdown.yaml", task, "3+7", "7*3")
    assert solved.failure is None and solved.reward == pytest.approx(0.8) and solved.is_success
    said = [message["content"] for call in solved.tree.calls for message in call.new_messages]
    assert said[0] == "3 7 make 21" and said[-1] == "no, 10"
    lost = play(monkeypatch, COUNTDOWN / "countdown.yaml", task, "3+7", "seven", "3-7", "7*3")
    assert lost.reward == 0.0 and len(lost.tree.calls) == 3


def test_the_shipped_countdown_data_is_what_its_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(COUNTDOWN))
    rules = module(COUNTDOWN / "countdown.py")
    script = module(COUNTDOWN / "make_data.py")
    script.write(tmp_path, 2, 11)
    for made in tmp_path.iterdir():
        assert made.read_text() == (COUNTDOWN / "data" / made.name).read_text(), made.name
    games = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert len(games) == 64 and all(len(game["numbers"]) == 2 for game in games)
    for line in (tmp_path / "conversations.jsonl").read_text().splitlines():
        for message in json.loads(line)["messages"]:
            if message["role"] == "assistant":
                numbers = [int(n) for n in json.loads(line)["messages"][0]["content"].split(" make ")[0].split()]
                assert rules.makes(message["content"], numbers) is not None


def test_a_walker_that_stands_still_uses_its_moves_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    task = Task(task_id="t", main_query="x", metadata={"seed": 1})
    episode = play(monkeypatch, LAKE / "frozenlake.yaml", task, "u")
    assert episode.failure is None, episode.failure
    assert episode.reward == 0.0 and len(episode.tree.calls) == 8  # it stood still until its moves were used up
    assert episode.ledger.trained + episode.ledger.masked["abandoned"] == episode.ledger.captured > 0
    assert episode.environment is not None
    assert [event.what for event in episode.environment.events] == ["reset", *["step"] * 8, "evaluate", "close"]


def test_a_walker_is_rewarded_for_the_goal_and_for_how_close_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    lake = module(LAKE / "frozenlake.py").Lake(size=3, max_moves=8)
    assert lake.reset(Task(task_id="t", metadata={"seed": 1})).startswith("@")
    walks = {}
    for first in "dr":
        for second in "dr":
            task = Task(task_id="t", main_query="x", metadata={"seed": 1})
            replies = [first, second, *("r" if first == "d" else "d") * 6]
            walks[first + second] = play(monkeypatch, LAKE / "frozenlake.yaml", task, *replies)
    best = max(walks.values(), key=lambda walk: walk.reward or 0.0)
    for walk in walks.values():
        assert walk.failure is None and walk.reward is not None
        assert walk.is_success is (walk.reward == 1.0) and (walk.reward == 1.0 or walk.reward <= 0.5)
    assert best.reward is not None and best.reward > 0.0


@pytest.mark.slow
def test_a_ready_agent_is_trained_in_the_lake_without_a_workflow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`rollout.agent` and `rollout.environment` together, two steps on `local`."""
    pytest.importorskip("gymnasium")
    agent = ["rollout.user_workflow=null", "rollout.agent.type=react", "rollout.agent.max_steps=8"]
    lengths = ["rollout.max_model_len=768", "data.max_prompt_length=256", "data.max_response_length=512"]
    # a random model doesn't end its replies itself, and one that is cut ends the agent's run
    lengths += [
        "rollout.max_response_length_in_one_turn=64",
        'rollout.agent.options={"sampling": {"stop": [" ", "e"]}}',
    ]
    train(monkeypatch, "example_frozenlake/frozenlake.yaml", tmp_path, *agent, *lengths)
    (episodes_file,) = tmp_path.glob("*/episodes.sqlite")
    store = EpisodeStore(episodes_file)
    episodes = [record.episode for record in store.all()]
    store.close()
    assert len(episodes) == 8 and not [episode.failure for episode in episodes if episode.failure]
    for episode in episodes:
        assert episode.environment is not None and episode.reward is not None
        moves = [event for event in episode.environment.events if event.what == "step"]
        assert 1 <= len(moves) <= len(episode.tree.calls)
        # one conversation: calls go on where the one before them ended, as far as the template lets random text stand
        assert len(episode.tree.calls) == 1 or any(call.extends >= 0 for call in episode.tree.calls)
