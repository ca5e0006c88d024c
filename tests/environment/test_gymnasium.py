"""gymnasium's environments in words: spaces described, observations written, actions read from replies."""

from __future__ import annotations

import pytest

from ajet.environment.environment import EnvironmentSettings, find_source
from ajet.environment.gymnasium_environment import (
    SpaceError,
    describe_space,
    fitting_action,
    task_seed,
    unsupported,
    value_text,
)
from ajet.environment.leased import LeasedEnvironment
from ajet.schema.errors import ConfigError
from ajet.schema.task import Task

gymnasium = pytest.importorskip("gymnasium")
np = pytest.importorskip("numpy")
spaces = gymnasium.spaces

FLAG = spaces.Dict({"on": spaces.Discrete(2), "where": spaces.Box(-1, 1, (2,), np.float32)})


def play(env_id: str, task: Task | None = None, **options: object) -> LeasedEnvironment:
    source = find_source(EnvironmentSettings(f"gymnasium:{env_id}", options=options))
    return LeasedEnvironment(source, task or Task(task_id="3"), "e").open()


def test_an_episode_in_words() -> None:
    env = play("FrozenLake-v1", is_slippery=False, action_names=["left", "down", "right", "up"])
    assert "FrozenLake-v1" in env.observation and "Each observation is a whole number from 0 to 15" in env.observation
    assert "Answer with your action: one of these words: left, down, right, up." in env.observation
    assert env.step("I was going to go up. Action: Right").observation == "Observation: 1"
    told, reward, done, info = env.step("jump")
    assert told.startswith("That is no action here: none of left, down, right, up is in 'jump'. Nothing happened.")
    assert (reward, done, info) == (0.0, False, {"invalid_action": True})
    for action in ("right", "down", "down", "down"):
        last = env.step(action)
    assert not last.done and last.observation == "Observation: 14"
    final = env.step("right")
    assert final.done and final.reward == 1.0 and final.info["terminated"] is True
    assert env.evaluate() == 1.0
    env.close()


def test_a_picture_in_text_takes_the_place_of_the_observation() -> None:
    env = play("FrozenLake-v1", render_mode="ansi", instructions="Cross the lake.")
    assert env.observation.startswith("Cross the lake.") and "FFF" in env.observation
    env.close()


def test_the_same_task_is_the_same_world() -> None:
    first = [play("CartPole-v1", Task(task_id=name)).observation for name in ("a", "a", "b")]
    assert first[0] == first[1] != first[2]
    assert task_seed(Task(task_id="12")) == 12
    assert task_seed(Task(task_id="12", metadata={"seed": 5})) == 5
    assert task_seed(Task(task_id="½")) >= 0


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Discrete(3, start=2), "a whole number from 2 to 4"),
        (spaces.Box(-2, 2, (1,), np.float32), "a number between -2 and 2"),
        (spaces.Box(0, 9, (2, 2), np.int64), "a list of 2 × 2 whole numbers between 0 and 9"),
        (spaces.MultiBinary(3), "a list of 3 numbers, each 0 or 1"),
        (spaces.MultiDiscrete([2, 5]), "a list of 2 whole numbers from 0, at most 1, 4"),
        (spaces.Text(5), "text of 1 to 5 characters"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(1)]), "a list of: a whole number from 0 to 1; text of 1"),
        (FLAG, 'a JSON object with "on": a whole number from 0 to 1; "where": a list of 2 numbers between -1 and 1'),
    ],
)
def test_spaces_are_described_and_every_value_of_one_can_be_said(space: object, words: str) -> None:
    assert describe_space(space, {}).startswith(words)
    space.seed(1)  # type: ignore[attr-defined]
    for _ in range(20):
        value = space.sample()  # type: ignore[attr-defined]
        again = fitting_action(space, f"Let me see.\nAction: {value_text(value)}", {})
        assert value_text(again) == value_text(value)


@pytest.mark.parametrize(
    ("space", "reply"),
    [
        (spaces.Discrete(3), ""),
        (spaces.Discrete(3), "go"),
        (spaces.Discrete(3), "3"),
        (spaces.Discrete(3), "1.5"),
        (spaces.Discrete(3), "9" * 5000),
        (spaces.Box(-1, 1, (2,), np.float32), "[1]"),
        (spaces.Box(-1, 1, (2,), np.float32), "[1, 5]"),
        (spaces.Box(-1, 1, (2,), np.float32), "[NaN, 0]"),
        (spaces.Box(-1, 1, (2,), np.float32), '{"a": 1}'),
        (spaces.Box(-1, 1, (2,), np.float32), '["a", "b"]'),
        (spaces.Box(0, 9, (2,), np.int64), "[0.5, 1]"),
        (spaces.Box(0, 255, (2,), np.uint8), "[256, 1]"),
        (spaces.MultiBinary(2), "[1, 2]"),
        (spaces.MultiBinary(2), "[257, 1]"),
        (spaces.Text(3), "long text"),
        (FLAG, "[1]"),
        (FLAG, '{"on": true, "where": [0, 0]}'),
        (FLAG, '{"on": 1}'),
        (FLAG, "{" * 100_000),
        (spaces.Tuple([spaces.Discrete(2)]), "[1, 2]"),
        (spaces.Tuple([spaces.Discrete(2)]), "[1e999]"),
        (spaces.Tuple([spaces.Discrete(2)]), "[NaN]"),
        (spaces.Tuple([spaces.Discrete(2)]), f"[{'9' * 400}]"),
    ],
)
def test_a_reply_that_does_not_fit_is_explained(space: object, reply: str) -> None:
    with pytest.raises(SpaceError) as caught:
        fitting_action(space, reply, {})
    assert 5 < len(str(caught.value)) < 200


def test_pictures_are_refused_before_a_run() -> None:
    assert unsupported(spaces.Box(0, 255, (210, 160, 3), np.uint8)) == "an array of shape (210, 160, 3)"
    assert unsupported(spaces.Graph(spaces.Discrete(2), None)) == "a space of type Graph"
    with pytest.raises(ConfigError, match="should be a list of names"):
        play("FrozenLake-v1", action_names="left")
