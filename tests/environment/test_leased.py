"""What a workflow sees of an environment, and that every lease ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from ajet.environment.environment import EnvironmentSettings, find_source
from ajet.environment.leased import KEPT_EVENTS, LeasedEnvironment
from ajet.schema.errors import ConfigError, EnvironmentFault, EnvironmentUnavailableError, ImportPathError
from ajet.schema.task import Task
from support import SUPPORT
from support.waiting import wait_until
from support.worlds import AsyncCounter, Counter

FILE = SUPPORT / "worlds.py"


def lease(kind: str = "Counter", query: str = "", **options: object) -> LeasedEnvironment:
    source = find_source(EnvironmentSettings(f"{FILE}->{kind}", options=options))
    return LeasedEnvironment(source, Task(main_query=query), "e-1")


@pytest.mark.parametrize("kind", [Counter, AsyncCounter])
def test_steps_are_taken_recorded_and_summed(kind: type, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = lease(kind.__name__, log=str(log)).open()
    assert env.reset() == env.observation == "Count to 3." and log.read_text() == "reset\n"
    observation, reward, done, info = env.step({"role": "assistant", "content": "one"})
    assert (observation, reward, done, info) == ("1", 0.25, False, {"count": 1})
    asyncio.run(env.astep("two"))
    assert asyncio.run(env.astep("three")).done
    assert env.evaluate("e-1", {"sparse": False}) == asyncio.run(env.aevaluate()) == 0.75
    env.close()
    env.close()
    assert log.read_text() == "reset\nclose\n"
    assert env.episode_uuid == "e-1"
    events = env.record.events
    assert [event.what for event in events] == ["reset", "step", "step", "step", "evaluate", "evaluate", "close"]
    assert [event.reward for event in events[1:5]] == [0.25, 0.25, 0.25, 0.75]
    assert [event.done for event in events[1:4]] == [False, False, True]
    assert events[1].action == "one" and events[1].observation == "1"


def test_a_reset_after_steps_begins_again() -> None:
    env = lease(size=1).open()
    assert env.step("one").done
    with pytest.raises(EnvironmentFault, match="leave the loop when `terminate` is true"):
        env.step("two")
    assert env.reset() == "Count to 1."
    assert env.step("one").done and env.evaluate() == 0.25
    env.close()


def test_a_reward_of_its_own_replaces_the_sum() -> None:
    env = lease("Judging").open()
    env.step("one")
    assert env.evaluate() == 0.0
    env.close()


def test_an_evaluate_that_returns_nothing_is_not_the_sum() -> None:
    env = lease("Misjudging").open()
    env.step("nothing")
    with pytest.raises(EnvironmentUnavailableError, match="reward from Misjudging must be a finite number, not None"):
        env.evaluate()
    env.close()


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("nan", "the reward from Counter.step must be a finite number, not nan"),
        ("text", "Counter.step returned 'only text' of type str, not a StepResult"),
    ],
)
def test_lies_are_faults(said: str, complaint: str) -> None:
    env = lease().open()
    with pytest.raises(EnvironmentFault, match=complaint):
        env.step(said)
    assert complaint in env.record.events[-1].error
    env.close()


def test_an_environment_that_cannot_begin_is_closed(tmp_path: Path) -> None:
    env = lease(query="no reset", log=str(tmp_path / "log"))
    with pytest.raises(RuntimeError, match="no world today"):
        env.open()
    assert (tmp_path / "log").read_text() == "reset\nclose\n"
    with pytest.raises(EnvironmentFault, match="episode e-1 is over"):
        env.step("one")


def test_a_first_observation_with_info_is_refused_before_a_model_is_shown_it() -> None:
    with pytest.raises(EnvironmentFault, match=r"Counter\.reset returned .*: return the observation alone"):
        lease(query="pair").open()


def test_closing_from_another_thread_ends_a_lease_whose_step_hangs(tmp_path: Path) -> None:
    env = lease(log=str(tmp_path / "log")).open()
    threading.Thread(target=env.step, args=("hang",), daemon=True).start()
    env.close()
    assert (tmp_path / "log").read_text() == "reset\nclose\n"


def test_a_step_that_awaits_for_ever_is_told_when_its_lease_is_closed(tmp_path: Path) -> None:
    env = lease("AsyncCounter", log=str(tmp_path / "log")).open()

    async def scene() -> None:
        step = asyncio.create_task(env.astep("wait"))
        while not (tmp_path / "log").read_text().endswith("waits\n"):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(env.close)
        with pytest.raises(EnvironmentFault, match="closed before it answered"):
            await step

    asyncio.run(scene())
    assert env.record.events[-1].error


@pytest.mark.parametrize("kind", ["Counter", "AsyncCounter"])
def test_an_environment_that_exits_raises_where_it_was_asked(kind: str) -> None:
    env = lease(kind).open()
    with pytest.raises(SystemExit):
        env.step("sys.exit")
    assert env.step("one").reward == 0.25
    env.close()


def test_an_environment_that_exits_as_it_closes_fails_nothing() -> None:
    before = set(threading.enumerate())
    env = lease("Leaving").open()
    env.close()
    assert env.record.events[-1].error == "SystemExit: 3"
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_lease_closed_while_it_opens_ends_when_it_is_open(tmp_path: Path) -> None:
    source = find_source(EnvironmentSettings(f"{FILE}->Counter", options={"log": str(tmp_path / "log")}))
    env = LeasedEnvironment(source, Task(), "e-1")
    making = source.make

    def make(episode_id: str) -> object:
        env.close()
        return making(episode_id)

    source.make = make  # type: ignore[method-assign,assignment]
    with pytest.raises(EnvironmentFault, match="is over"):
        env.open()
    assert (tmp_path / "log").read_text().endswith("close\n")


def test_of_endless_steps_the_record_keeps_the_first_and_counts_the_rest() -> None:
    env = lease(size=2 * KEPT_EVENTS).open()
    for _ in range(KEPT_EVENTS + 10):
        env.step("x" * 2000)
    env.close()
    assert env.record.left_out == 11
    assert len(env.record.events) == KEPT_EVENTS + 1 and env.record.events[-1].what == "close"
    assert len(env.record.events[1].action) == 501


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (EnvironmentSettings(f"{FILE}->Nobody"), "has no 'Nobody'; there is: "),
        (EnvironmentSettings(f"{FILE}->Task"), "isn't a class derived from Environment"),
        (EnvironmentSettings("CartPole-v1"), "'CartPole-v1' names no environment"),
        (EnvironmentSettings(url="http://127.0.0.1:99999"), "is not an address"),
        (EnvironmentSettings(url="http://127.0.0.1:80x"), "is not an address"),
        (EnvironmentSettings(url="http://[::1"), "is not an address"),
        (EnvironmentSettings(url="http://u:p@127.0.0.1:80"), "holds no user"),
        (EnvironmentSettings(url="http://127.0.0.1:80/?a=b"), "ends with its path"),
        (EnvironmentSettings(url="http://127.0.0.1:80", api_key="key\n"), "`api_key` holds a line break"),
        (EnvironmentSettings(url="http://127.0.0.1:80", api_key="€"), "`api_key` holds"),
        (EnvironmentSettings(url="localhost:80"), "'localhost:80' is not an address"),
        (EnvironmentSettings(f"{FILE}->Counter", options={"colour": 1}), "`options` don't fit Counter.*colour"),
        (EnvironmentSettings("gymnasium:NoSuch-v0"), "gymnasium can't make 'NoSuch-v0'.*NameNotFound"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(settings: EnvironmentSettings, complaint: str) -> None:
    with pytest.raises((ConfigError, ImportPathError), match=f"(?s)ajet.rollout.environment: .*{complaint}"):
        find_source(settings)
