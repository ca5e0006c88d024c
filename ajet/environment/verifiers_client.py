"""`VerifiersHost`: a process that plays tasks of an environment of the package verifiers, in an environment of its own.

verifiers plays an episode itself: it brings the agent's program, the tools and the reward. We only give it an endpoint.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ajet.schema.errors import ConfigError, EnvironmentFault, EnvironmentUnavailableError

HOST = Path(__file__).with_name("verifiers_host.py")
START_S = 180.0
"""How long the package may take to be imported."""
KEPT_LINES = 20
"""Of what the process prints, how much is kept for an error message."""
KEY = "ajet.task_reader.options"
KNOWN = ("env", "python", "num_tasks", "num_validation_tasks")


class VerifiersHost:
    """One process. Any thread may ask it."""

    def __init__(self, env: Mapping[str, Any], python: str | None = None) -> None:
        """`env`: verifiers' config of an environment (`{"taskset": {"id": …}}`); `python`: the interpreter with it."""
        self._interpreter = python or sys.executable
        self._ready: Future[Any] = Future()
        self._answers = {"ready": self._ready}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        reading, writing = os.pipe()
        command = [self._interpreter, str(HOST), str(writing), json.dumps(env)]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
                text=True,
                env=environment,
            )
        except OSError as error:
            os.close(reading)
            raise ConfigError(f"{KEY}.python: {self._interpreter} can't be run: {error.strerror}") from None
        finally:
            os.close(writing)
        threading.Thread(target=self._read, args=(reading,), name="verifiers-answers", daemon=True).start()
        threading.Thread(target=self._listen, name="verifiers-log", daemon=True).start()

    def ready(self) -> VerifiersHost:
        """Wait until it has loaded the environment. Raises ConfigError."""
        try:
            self._ready.result(START_S)
        except EnvironmentFault as error:
            self.close()
            raise ConfigError(
                f"{KEY}: verifiers can't load this environment with {self._interpreter}: {error}\n"
                "    install it there (pip install 'verifiers>=0.4'), or name another interpreter in options.python"
            ) from None
        except TimeoutError:
            self.close()
            raise ConfigError(f"{KEY}: verifiers did not load this environment within {START_S:g} s") from None
        return self

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def tasks(self, limit: int) -> list[dict[str, Any]]:
        """The first tasks: `index` and `query`."""
        tasks: list[dict[str, Any]] = self._ask("tasks", limit=limit)[1].result()
        return tasks

    async def play(self, index: int, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Play one episode. Cancelling the wait ends it."""
        number, answer = self._ask("run", index=index, base_url=base_url, api_key=api_key, model=model)
        try:
            played: dict[str, Any] = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._send({"do": "cancel", "of": number})
            raise
        return played

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, do: str, **fields: Any) -> tuple[str, Future[Any]]:
        number = str(next(self._numbers))
        answer: Future[Any] = Future()
        self._answers[number] = answer
        if not self._send({"do": do, "id": number, **fields}):
            self._fail(EnvironmentUnavailableError(f"the process of verifiers has ended: {self._last_lines()}"))
        return number, answer

    def _send(self, request: dict[str, Any]) -> bool:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8") as answers:
            for line in answers:
                answer = json.loads(line)
                future = self._answers.pop(answer["id"], None)
                if future is None or future.cancelled():
                    continue
                if "error" in answer:
                    future.set_exception(EnvironmentFault(f"verifiers: {answer['error']}"))
                else:
                    future.set_result(answer.get("value"))
        self._fail(EnvironmentUnavailableError(f"the process of verifiers has ended: {self._last_lines()}"))

    def _fail(self, error: EnvironmentFault) -> None:
        while self._answers:
            _, future = self._answers.popitem()
            if not future.done():
                future.set_exception(error)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.rstrip())
            sys.stderr.write(line)

    def _last_lines(self) -> str:
        return " | ".join(list(self._said)[-3:]) or "it said nothing"


_hosts: dict[tuple[str, str | None], VerifiersHost] = {}
_hosts_lock = threading.Lock()


def shared_host(env: Mapping[str, Any], python: str | None) -> VerifiersHost:
    """This process's host for an environment; it ends with the process."""
    key = json.dumps(env, sort_keys=True), python
    with _hosts_lock:
        host = _hosts.get(key)
        if host is None or not host.alive:
            host = _hosts[key] = VerifiersHost(env, python)
            atexit.register(host.close)
    return host.ready()


def host_options(options: Any) -> tuple[dict[str, Any], str | None]:
    """The environment's config and the interpreter, checked."""
    unknown = [name for name in options if name not in KNOWN]
    if unknown:
        raise ConfigError(f"{KEY}.{unknown[0]}: unknown option; there are {', '.join(KNOWN)}")
    env = options.get("env")
    if not isinstance(env, dict) or not isinstance(env.get("taskset"), dict) or not env["taskset"].get("id"):
        raise ConfigError(f"{KEY}.env: name the environment's tasks: `env: {{taskset: {{id: gsm8k}}}}`")
    return _plain(env), options.get("python")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
