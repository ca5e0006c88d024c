"""Programs that run beside a run and end with it, restarted if they die: services of the YAML, flags, the viewer."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from ajet.schema.errors import UserError
from ajet.system.command_line import termination_like_interrupt
from ajet.system.http_messages import is_loopback
from ajet.system.processes import STARTED_BY, end_all, made_state_folder, recorded

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long a service may take to end by itself: less than Ctrl-C promises for the run."""
START_S = 600.0
"""How long a `--with-NAME` service may take until it answers."""
RESTARTS = 3
"""How often a `--with-NAME` service is started again."""
LAST_BYTES = 4000
"""How much of a service's log, which may be large, is read for its last lines."""
NOTICE_S = 15.0
"""How often, in seconds, a wait is mentioned on the terminal."""


class ServiceError(UserError):
    """A service that can't be started."""


@dataclass(frozen=True, slots=True)
class Service:
    """A program to run beside the run."""

    name: str
    key: str
    """Where it was asked for, for error messages."""
    command: str
    folder: Path
    address: tuple[str, int] | None = None
    start_timeout_s: float = START_S
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = RESTARTS


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wanted_services(config: Config, flags: Sequence[str]) -> list[Service]:
    """The services of the YAML, then those of `--with-NAME` flags that the YAML doesn't have."""
    services = []
    for name, given in config.ajet.services.items():
        key = f"ajet.services.{name}"
        address = None if given.address is None else _address(given.address, f"{key}.address")
        folder = Path(given.folder).expanduser()
        services.append(
            Service(name, key, given.command, folder, address, given.start_timeout, given.env, given.restarts)
        )
    return services + [_of_flag(name, config) for name in flags if name not in config.ajet.services]


def _of_flag(name: str, config: Config) -> Service:
    """`--with-NAME`: $NAME_SCRIPT in $NAME_PATH, answering at $NAME_URL, or else at the environments' own address."""
    own = _dot_env()
    variables = {**own, **os.environ}
    variable = re.sub(r"\W", "_", name).upper()
    folder, script = variables.get(f"{variable}_PATH"), variables.get(f"{variable}_SCRIPT")
    for what, value in ((f"{variable}_PATH", folder), (f"{variable}_SCRIPT", script)):
        if not value:
            there = sorted(key.removesuffix("_SCRIPT").lower() for key in variables if key.endswith("_SCRIPT"))
            flags = [f"--with-{each.replace('_', '-')}" for each in there if f"{each}_PATH".upper() in variables]
            known = f" (there are: {', '.join(flags)})" if flags else ""
            raise ServiceError(
                f"--with-{name}: the environment variable {what} is not set, nor is it in .env{known}\n"
                f"    export {variable}_PATH=/folder/of/the/service {variable}_SCRIPT='bash start.sh'"
            )
    assert folder is not None and script is not None
    url = variables.get(f"{variable}_URL") or _environment_url(config)
    address = None if url is None else _address(url, f"{variable}_URL")
    env = {key: value for key, value in own.items() if key not in os.environ}
    return Service(name, f"--with-{name}", script, Path(folder), address, env=env)


def _environment_url(config: Config) -> str | None:
    """Where the run expects its environments, if that is on this machine."""
    world, reader = config.ajet.rollout.environment, config.ajet.task_reader
    if world is not None and (world.source is not None or world.url is not None):
        url = world.url
    else:
        url = reader.env_service.env_url if reader.type == "env_service" or "->" in reader.type else None
    return url if url and is_loopback(urlsplit(url).hostname or "") else None


def _address(text: str, key: str) -> tuple[str, int]:
    parts = urlsplit(text if "//" in text else f"//{text}")
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise ServiceError(f"{key}: {text!r} is not an address\n    write host:port or http://host:port")
    return parts.hostname, port


def _dot_env() -> dict[str, str]:
    """`NAME=value` lines of `.env` in the working directory."""
    file = Path(".env")
    if not file.is_file():
        return {}
    found = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.strip().isidentifier():
            found[name.strip()] = value.strip().strip("'\"")
    return found


@contextmanager
def yaml_services(config: Config, *, use_running: bool = False) -> Iterator[None]:
    """The services of the YAML, for commands that need them without being a run: what is said goes to stderr, and
    SIGTERM ends the command like Ctrl-C, and so the services. `use_running`: one whose address answers, because a run
    has it or the user has started it, is not started."""
    with ExitStack() as stack:
        stack.enter_context(termination_like_interrupt())
        for service in wanted_services(config, ()):
            if use_running and service.address is not None and answers(service.address):
                continue
            stack.enter_context(start_service(service, say=say_on_stderr))
        yield


@contextmanager
def start_service(service: Service, prefix: str = "", say: Callable[[str], None] = log.info) -> Iterator[None]:
    """Start a service, wait until it answers, keep it running, and end it with the block."""

    if not service.folder.is_dir():
        raise ServiceError(f"{service.key}: the folder {service.folder} does not exist")
    if service.address is not None and answers(service.address):
        host, port = service.address
        raise ServiceError(
            f"{service.key}: something answers at {host}:{port} already, before the service was started\n"
            "    end it (`ajet --kill` if an earlier run started it), or start the run without this service"
        )
    keeper = ServiceKeeper(service, prefix)
    keeper.start(say)
    try:
        yield
    finally:
        keeper.close()


@dataclass(frozen=True, slots=True)
class Started:
    process: subprocess.Popen[bytes]
    log: Path

    def last_lines(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            text = file.read().decode(errors="replace")
        return "\n    ".join(text.strip().splitlines()[-5:])


def with_our_programs(env: dict[str, str]) -> dict[str, str]:
    """`ajet env serve` is found although the run was started as `.venv/bin/ajet`, in an environment not activated."""
    path = [folder for folder in (env.get("PATH"), str(Path(sys.executable).parent)) if folder]
    return {**env, "PATH": os.pathsep.join(path)}


@contextmanager
def start_command(
    name: str,
    command: list[str],
    *,
    cwd: Path | None = None,
    prefix: str = "",
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = log.info,
) -> Iterator[Started]:
    """Start a recorded process, yield it, and end it and its children with the block."""
    mark = uuid.uuid4().hex
    log_file = made_state_folder() / f"{prefix}{name}-{mark[:8]}.log"
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**with_our_programs({**os.environ, **(env or {})}), STARTED_BY: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    leader = psutil.Process(process.pid)  # not reaped yet, so its id is still its own
    started = Started(process, log_file)

    def end() -> None:
        end_all(STARTED_BY, mark, PATIENCE_S, leader=leader)
        process.poll()

    with ExitStack() as ending:
        ending.callback(end)
        # once it is recorded, it ends before its record is removed
        with recorded(mark, name, prefix, process.pid, shlex.join(command)), ending.pop_all():
            time.sleep(0.2)  # long enough for a script that can't start at all to end
            if process.poll() not in (None, 0):
                raise ServiceError(
                    f"{name} ended immediately with exit code {process.returncode}\n    {started.last_lines()}"
                )
            say(f"started {prefix}{name} (pid {process.pid}, log {log_file})")
            yield started


def wait_for(service: Service, started: Started, ending: threading.Event, say: Callable[[str], None]) -> None:
    """Wait until something answers at the service's address, or until the run ends. The service may leave processes
    behind, and end with code 0."""
    assert service.address is not None
    host, port = service.address
    began = noticed = time.monotonic()
    while not answers(service.address) and not ending.is_set():
        if started.process.poll() not in (None, 0):
            raise ServiceError(
                f"{service.key}: {service.name} ended with exit code {started.process.returncode} before it answered "
                f"at {host}:{port}\n    {started.last_lines()}"
            )
        now = time.monotonic()
        if now - began > service.start_timeout_s:
            raise ServiceError(
                f"{service.key}: {service.name} did not answer at {host}:{port} within {service.start_timeout_s:g} s\n"
                f"    its log: {started.log}\n    {started.last_lines()}"
            )
        if now - noticed > NOTICE_S:
            noticed = now
            say(f"waiting for {service.name} at {host}:{port} ({now - began:.0f} s, log {started.log})")
        ending.wait(0.1)


def answers(address: tuple[str, int], timeout_s: float = 2.0) -> bool:
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except OSError:
        return False
    return True


LOOK_S = 0.25
"""How often it looks whether the service's process has ended."""
ASK_S = 2.0
"""How often it asks a service that went to the background whether it still answers."""
FIRST_PAUSE_S = 0.5
"""The pause before the first start in a row. Clients of a service wait longer than that and its start together."""
LONGEST_PAUSE_S = 30.0
STEADY_S = 300.0
"""A service that ran for so long has recovered: its starts are counted from zero."""


class ServiceKeeper:
    """Starts a service, starts it again if it ends, and ends it."""

    def __init__(self, service: Service, prefix: str = "") -> None:
        self._service = service
        self._prefix = prefix
        self._running = ExitStack()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, say: Callable[[str], None] = log.info) -> None:
        """Start it and wait until it answers. Raises `ServiceError`."""
        try:
            started = self._start_once(say)
        except BaseException:  # Ctrl-C too: nothing that was started may stay
            self._running.close()
            raise
        self._thread = threading.Thread(target=self._keep, args=(started,), name="ajet-service", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._ending.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self._running.close()

    def _start_once(self, say: Callable[[str], None]) -> Started:
        service = self._service
        command = ["bash", "-c", service.command]
        started = self._running.enter_context(
            start_command(service.name, command, cwd=service.folder, prefix=self._prefix, env=service.env, say=say)
        )
        if service.address is not None:
            wait_for(service, started, self._ending, say)
        return started

    def _keep(self, started: Started) -> None:
        """Until the run ends, or the service has ended too often."""
        restarts, began = 0, time.monotonic()
        while (end := self._wait_for_end(started)) is not None:
            if time.monotonic() - began > STEADY_S:
                restarts = 0
            next_start: Started | None = None
            while next_start is None:
                if restarts >= self._service.restarts:
                    self._give_up(end, restarts)
                    return
                pause = min(FIRST_PAUSE_S * 2**restarts, LONGEST_PAUSE_S)
                restarts += 1
                log.warning("%s\n    start %d of %d follows in %g s", end, restarts, self._service.restarts, pause)
                if self._ending.wait(pause):
                    return
                try:
                    next_start = self._start_again()
                except (ServiceError, OSError) as error:
                    end = str(error)
            started, began = next_start, time.monotonic()

    def _start_again(self) -> Started:
        self._running.close()  # what the old one left behind would hold its port
        self._running = ExitStack()
        return self._start_once(lambda text: log.warning("%s", text))

    def _give_up(self, end: str, restarts: int) -> None:
        often = f"It was started again {restarts} times already" if restarts else "It may not be started again"
        log.error("%s\n    %s (`restarts`): episodes that need it will fail", end, often)

    def _wait_for_end(self, started: Started) -> str | None:
        """How the service ended. None: the run ended first, or the service was done."""
        code = started.process.poll()
        while code is None:
            if self._ending.wait(LOOK_S):
                return None
            code = started.process.poll()
        if code == 0:
            if self._service.address is None:
                return None
            while answers(self._service.address) or answers(self._service.address):  # twice: it may only be busy
                if self._ending.wait(ASK_S):
                    return None
        if self._ending.is_set():
            return None
        return f"the service {self._service.name} {_how(code)}. Its log: {started.log}\n    {started.last_lines()}"


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "answers no more"
