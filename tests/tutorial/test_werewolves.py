"""Werewolves: the rules, what each role may know, the data, and runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ajet.schema.task import Task
from support.tutorial_runs import TUTORIAL, debug, imports, play, train

CONF = "example_werewolves/werewolves.yaml"


@pytest.fixture
def files() -> Iterator[Any]:
    """The tutorial's modules."""
    with imports("example_werewolves"):
        import game
        import make_data
        import players

        yield type("Files", (), {"game": game, "players": players, "make_data": make_data})


class Watched:
    """A player by rules who keeps what it was shown, and every prompt that a model would have got."""

    def __init__(self, files: Any, name: str, rng: random.Random) -> None:
        self.seen: list[Any] = []
        self.prompts: list[str] = []
        self._files = files
        self._inner = files.players.RulePlayer(name, rng)

    def _watch(self, view: Any, purpose: str, options: list[str]) -> None:
        self.seen.append(view)
        for question in (self._files.players.long_question, self._files.players.short_question):
            self.prompts.append("\n".join(message["content"] for message in question(view, purpose, options)))

    async def speak(self, view: Any, purpose: str) -> str:
        self._watch(view, purpose, [])
        return "Let us eat them." if purpose == "discuss" else await self._inner.speak(view, purpose)

    async def choose(self, view: Any, purpose: str, options: list[str]) -> str | None:
        self._watch(view, purpose, options)
        return await self._inner.choose(view, purpose, options)


def test_hidden_information_stays_hidden(files: Any) -> None:
    game = files.game
    checked = 0
    for seed in range(20):
        rng = random.Random(seed)
        roles = game.deal(rng)
        assert sorted(roles.values()) == sorted(game.ROLES)
        watched = {name: Watched(files, name, rng) for name in roles}
        result = asyncio.run(game.Game(roles, watched, rng, discussion_rounds=1).play())
        assert 1 <= result.rounds <= game.MOST_ROUNDS
        pack = {name for name, role in roles.items() if role == game.WOLF}
        for name, player in watched.items():
            for view in player.seen:
                assert set(view.roles) == (pack if name in pack else {name})
                checked += any(event.kind == "checked" for event in view.events)
                if roles[name] != game.SEER:
                    assert all(event.kind != "checked" for event in view.events)
            assert name in pack or not any("eat them" in prompt for prompt in player.prompts)
    assert checked, "no seer learnt anything"


def test_games_end_and_the_better_werewolves_win_more(files: Any) -> None:
    game, players, make_data = files.game, files.players, files.make_data

    def share(wolf: Any) -> float:
        won = 0
        for seed in range(80):
            rng = random.Random(seed)
            roles = game.deal(rng)
            table = {
                name: wolf(name, rng) if role == game.WOLF else players.RulePlayer(name, rng)
                for name, role in roles.items()
            }
            won += asyncio.run(game.Game(roles, table, rng).play()).wolves_won
        return won / 80

    class Mute:
        def __init__(self, name: str, rng: random.Random) -> None: ...

        async def speak(self, view: Any, purpose: str) -> str:
            return ""

        async def choose(self, view: Any, purpose: str, options: list[str]) -> str | None:
            return "the moon"

    mute, guessing = share(Mute), share(lambda name, rng: make_data.Beginner(name, rng, [], skill=0.0))
    assert mute < guessing < share(players.RulePlayer)


@pytest.mark.parametrize(
    ("reply", "name"),
    [
        ("Dora", "Dora"),
        ("I say: dora, not Ben.", "Dora"),
        ("B", "Ben"),
        (" **B** ", "Ben"),
        ("Bob", None),
        ("", None),
        ("nobody", None),
        ("<think>hm</think> Carl", None),
    ],
)
def test_replies_are_read_forgivingly(files: Any, reply: str, name: str | None) -> None:
    assert files.players.named(reply, ["Ben", "Dora"]) == name


def test_the_shipped_data_is_what_its_script_makes(files: Any, tmp_path: Path) -> None:
    files.make_data.write(tmp_path, 3)
    for made in tmp_path.iterdir():
        assert made.read_text() == (TUTORIAL / "example_werewolves" / "data" / made.name).read_text(), made.name


@pytest.mark.parametrize("prompts", ["short", "long"])
def test_only_the_werewolves_are_trained(monkeypatch: pytest.MonkeyPatch, prompts: str) -> None:
    task = Task(task_id="t", main_query="x", metadata={"random_number": 4})
    overrides = ["werewolves.opponents=model", f"werewolves.prompts={prompts}", "werewolves.discussion_rounds=1"]
    lengths = ["rollout.max_model_len=2048", "data.max_prompt_length=2000"]
    episode = play(monkeypatch, CONF, task, ["A", "B", "C", "D", "nobody"], *overrides, *lengths)
    assert episode.failure is None, episode.failure
    assert episode.reward in (0.0, 1.0)
    costs = {call.agent: call.reward for call in episode.tree.calls if call.reward is not None}
    assert costs and set(costs.values()) == {-1.0} and len(costs) <= 3  # of werewolves alone
    trained = {call.agent for call in episode.tree.calls if call.mask.any()}
    assert len(trained) == 3 and len({call.agent for call in episode.tree.calls}) == 9


def test_the_village_can_be_trained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(task_id="t", main_query="x", metadata={"random_number": 4})
    workflow = "rollout.user_workflow=tutorial/example_werewolves/werewolves.py->VillageWorkflow"
    episode = play(monkeypatch, CONF, task, ["A"], workflow)
    assert episode.failure is None and len({call.agent for call in episode.tree.calls}) == 6


@pytest.mark.slow
def test_on_debug_and_two_steps_on_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = debug(monkeypatch, CONF, tmp_path / "debug")
    assert len(episodes) == 2 and all(episode.reward in (0.0, 1.0) for episode in episodes)
    train(monkeypatch, CONF, tmp_path / "local")
