"""What a config asks for around an episode: which environment."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from ajet.config import make_config
from ajet.config.contradictions import contradictions
from ajet.environment.environment import NOTHING_OBSERVED, EnvironmentSettings
from ajet.schema.task import Task, WorkflowTask
from ajet.task_runner.environments import enter, environment_settings

SERVICE = {
    "task_reader.type": "env_service",
    "task_reader.env_service.env_url": "http://127.0.0.1:8080",
    "task_reader.env_service.env_type": "appworld",
    "task_reader.env_service.api_key": "its-key",
}


def settings_of(**keys: object) -> EnvironmentSettings:
    found = environment_settings(make_config({**SERVICE, **{f"rollout.environment.{key}": keys[key] for key in keys}}))
    assert found is not None
    return found


def test_the_timeout_of_the_tasks_service_can_be_set_alone() -> None:
    plain, patient = settings_of(), settings_of(timeout=900.0)
    assert (plain.url, plain.timeout_s) == ("http://127.0.0.1:8080", 300.0)
    assert (patient.url, patient.env_type, patient.api_key) == (plain.url, "appworld", "its-key")
    assert patient.timeout_s == 900.0


def test_a_place_of_its_own_replaces_the_tasks_service() -> None:
    found = settings_of(source="gymnasium:CartPole-v1", timeout=60.0)
    assert (found.source, found.url, found.api_key) == ("gymnasium:CartPole-v1", None, None)


def test_the_environment_needs_a_place_unless_the_tasks_come_from_a_service() -> None:
    alone = {"rollout.environment.timeout": 60.0}
    assert not list(contradictions(make_config({**SERVICE, **alone}).ajet, "local"))
    (found,) = contradictions(make_config(alone).ajet, "local")
    assert "neither a `source`" in found.what


def test_a_tasks_metadata_stay_what_its_reader_made_them() -> None:
    class Leased:
        observation: ClassVar[list[dict[str, str]]] = [{"role": "user", "content": "go"}]

        def open(self) -> None: ...

    record = Task(main_query="a model of its own")
    work = WorkflowTask(task=Task(metadata={"record": record}))
    leased: Any = Leased()
    enter(leased, work)
    assert (work.task.main_query, work.task.init_messages) == ("go", Leased.observation)
    assert work.task.metadata["record"] is record


@pytest.mark.parametrize("nothing", [None, "", []])
def test_a_first_observation_of_nothing_is_said_as_by_a_service(nothing: Any) -> None:
    class Leased:
        observation = nothing

        def open(self) -> None: ...

    work = WorkflowTask(task=Task())
    leased: Any = Leased()
    enter(leased, work)
    assert work.task.init_messages == [{"role": "user", "content": NOTHING_OBSERVED}]
