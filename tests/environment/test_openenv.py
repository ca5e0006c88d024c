"""OpenEnv's real server and client. The package needs an environment of its own: `make test-openenv`."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from ajet.environment import openenv_environment
from ajet.environment.environment import EnvironmentSettings, find_source
from ajet.environment.leased import LeasedEnvironment
from ajet.environment.openenv_environment import action_schema
from ajet.schema.errors import EnvironmentFault, EnvironmentUnavailableError, MissingDependencyError, UserError
from ajet.schema.task import Task
from support.waiting import wait_until

INSTALLED = importlib.util.find_spec("openenv") is not None
needs_openenv = pytest.mark.skipif(not INSTALLED, reason="openenv-core is not installed")

SESSIONS: list[str] = []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of a guessing game."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):  # type: ignore[misc]
        number: int

    class Hint(Observation):  # type: ignore[misc]
        text: str = ""

    class World(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Any:
            self.secret, self.tries = (seed or 0) % 10, more.get("tries", 3)
            SESSIONS.append(f"reset {episode_id}")
            return Hint(text="Guess.", done=False, reward=None)

        def step(self, action: Any, timeout_s: float | None = None, **more: Any) -> Any:
            if action.number == 13:
                raise RuntimeError("unlucky")
            self.tries -= 1
            right = action.number == self.secret
            return Hint(text="right" if right else "wrong", done=right or not self.tries, reward=float(right))

        @property
        def state(self) -> Any:
            return State(episode_id="e", step_count=self.tries)

        def close(self) -> None:
            SESSIONS.append("closed")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    app = create_fastapi_app(World, Guess, Hint, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, 60)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


def lease(url: str, **options: Any) -> LeasedEnvironment:
    settings = EnvironmentSettings(url=url, protocol="openenv", options=options, timeout_s=30)
    return LeasedEnvironment(find_source(settings), Task(task_id="7"), "e-1")


@needs_openenv
def test_an_episode(url: str) -> None:
    env = lease(url, tries=5).open()
    assert env.observation == "Answer with your action: a whole number for number.\n\nGuess."
    assert tuple(env.step("Action: 3")) == ("wrong", 0.0, False, {})
    told = env.step("three")
    assert told.observation.startswith("That is no action here: 'three' is not of type 'integer'.")
    assert env.step("7").done and env.evaluate() == 1.0
    before = SESSIONS.count("closed")
    env.close()
    wait_until(lambda: SESSIONS.count("closed") > before)
    assert env.record.events[-1].error == ""
    assert "reset e-1" in SESSIONS


class Schema(BaseHTTPRequestHandler):
    """Behind a proxy, which says first that it isn't there yet."""

    statuses: ClassVar[list[int]]

    def do_GET(self) -> None:
        status = self.statuses.pop(0)
        body = b'{"action": {"type": "object"}}' if status == 200 else b"Restarting."
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_server_that_is_being_restarted_is_waited_for() -> None:
    Schema.statuses = [503, 200]
    server = HTTPServer(("127.0.0.1", 0), Schema, bind_and_activate=False)
    server.server_bind()  # connections are refused until it listens

    def begin() -> None:
        server.server_activate()
        server.handle_request()
        server.handle_request()

    begun = threading.Timer(0.2, begin)
    begun.daemon = True
    begun.start()
    schema = asyncio.run(action_schema(f"http://127.0.0.1:{server.server_address[1]}"))
    begun.join(10)
    server.server_close()
    assert schema == {"type": "object"}


@needs_openenv
def test_a_step_that_raises_is_a_fault(url: str) -> None:
    env = lease(url).open()
    with pytest.raises(EnvironmentFault, match="step") as caught:
        env.step("13")
    assert not isinstance(caught.value, EnvironmentUnavailableError)
    env.close()


@needs_openenv
def test_a_server_that_is_not_there_or_speaks_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_environment, "GONE_S", 0.0)
    with pytest.raises(EnvironmentUnavailableError, match=r"OpenEnv server http://127\.0\.0\.1:9"):
        lease("http://127.0.0.1:9").open()


@pytest.mark.skipif(INSTALLED, reason="openenv-core is installed")
def test_without_the_package_it_is_refused() -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[openenv\]'"):
        lease("http://127.0.0.1:9")


@needs_openenv
def test_keys_are_refused() -> None:
    with pytest.raises(UserError, match="OpenEnv's protocol has no keys"):
        find_source(EnvironmentSettings(url="http://127.0.0.1:9", protocol="openenv", api_key="k"))
