"""The clean process from which an environment server forks one process per instance (see `ajet.system.forking`).

It imports the user's class once and never creates an environment itself. An instance's process has one environment, and
receives requests over a socket, one JSON object per line.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ajet.environment.environment import (
    EnvironmentSettings,
    EnvironmentSource,
    action_message,
    find_source,
    observation_messages,
    observed,
)
from ajet.environment.gymnasium_environment import plain_value
from ajet.environment.leased import LeasedEnvironment
from ajet.schema.printable import encodable_values
from ajet.schema.task import Task
from ajet.system.forking import ForkingServer

TRACEBACK_CHARS = 8000


def serve_instance(source: EnvironmentSource, channel: socket.socket) -> None:
    """Answer requests until `close` or the end of the channel."""
    lease: LeasedEnvironment | None = None
    try:
        for line in _lines(channel):
            request = json.loads(line)
            if request["do"] == "close":
                return
            if request["do"] == "task_ids":
                answer = _answered(lambda: source.task_ids(request["split"]))  # noqa: B023 - called at once
            elif request["do"] == "create":
                lease = LeasedEnvironment(source, Task.model_validate(request["task"]), request["instance_id"])
                answer = _answered(lambda: _created(lease, request))  # noqa: B023
            else:
                assert lease is not None
                answer = _answered(lambda: _asked(lease, request))  # noqa: B023
            channel.sendall(answer)
    except ConnectionError:
        return  # the server has ended this instance, or itself
    finally:
        if lease is not None:
            lease.close()
        channel.close()


def _lines(channel: socket.socket) -> Iterator[bytes]:
    with channel.makefile("rb") as file:
        yield from file


def _created(lease: LeasedEnvironment, request: dict[str, Any]) -> dict[str, Any]:
    lease.open()
    info: dict[str, Any] = {"instance_id": lease.episode_uuid, "task_id": request["task"]["task_id"]}
    if lease.tools:
        info["tools"] = list(lease.tools)
    return {"state": observation_messages(observed(lease.observation)), "info": info}


def _asked(lease: LeasedEnvironment, request: dict[str, Any]) -> Any:
    if request["do"] == "step":
        observation, reward, done, info = lease.step(action_message(request["action"]))
        state = observation_messages(observed(observation))
        return {"state": state, "reward": reward, "is_terminated": done, "info": info}
    if request["do"] == "evaluate":
        return lease.evaluate(params=request["params"])
    return lease.info()


def _answered(work: Callable[[], Any]) -> bytes:
    """The line that answers a request: `data`, or an error. An exception of the environment, or an answer of it that
    has no JSON form, fails only its request."""
    try:
        answer = json.dumps({"data": work()}, default=plain_value)
    except Exception:  # noqa: BLE001 - user code may raise anything; the client is told
        answer = json.dumps({"error": traceback.format_exc()[-TRACEBACK_CHARS:]})
    return json.dumps(encodable_values(json.loads(answer))).encode() + b"\n"


class InstanceServer(ForkingServer):
    """The server, with the user's code imported."""

    descriptors = 1
    threads_warning = "importing the environment started threads ({names}); its instances lack them"

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        super().__init__(control)
        self._source = find_source(EnvironmentSettings(**setup["settings"]), [Path(d) for d in setup["base_dirs"]])
        self._memory: int = setup["memory_bytes"]

    def facts(self) -> dict[str, Any]:
        return {"name": self._source.name}

    def child(self, *descriptors: int) -> int:
        try:
            if self._memory:
                resource.setrlimit(resource.RLIMIT_DATA, (self._memory, self._memory))
            serve_instance(self._source, socket.socket(fileno=descriptors[0]))
            return 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
