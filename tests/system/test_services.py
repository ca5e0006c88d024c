"""Services beside a run: started, waited for, watched, started again, ended; and what is wrong with one is said."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from ajet.config import load_config, make_config
from ajet.schema.episode import EpisodeStatus
from ajet.schema.errors import ConfigError
from ajet.schema.task import Task
from ajet.system import processes, services
from ajet.system.processes import still_running
from ajet.system.services import Service, ServiceError, Started, start_service, wanted_services, yaml_services
from ajet.task_runner.runtime import Runtime
from support import SUPPORT
from support.ports import free_port
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AJET_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(services, "FIRST_PAUSE_S", 0.01)


def listening(port: int) -> str:
    program = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print('up'); time.sleep(99)"
    return f'{sys.executable} -c "{program}"'


def service(command: str, **more: Any) -> Service:
    return Service("world", "ajet.services.world", command, Path(), **more)


def test_the_run_waits_until_it_answers_and_nothing_is_left(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "ajet")
    address = ("127.0.0.1", free_port())
    before = set(psutil.Process().children(recursive=True))
    with start_service(service(f"echo $GREETING; {listening(address[1])}", address=address, env={"GREETING": "hello"})):
        socket.create_connection(address).close()
        children = set(psutil.Process().children(recursive=True)) - before
    assert children
    wait_until(lambda: not any(child.is_running() for child in children))
    assert "started world (pid " in caplog.text
    assert not capsys.readouterr().out, "with --json, each line there is an object"
    (log,) = Path("state").glob("world-*.log")
    assert log.read_text().startswith("hello")


def test_one_that_cannot_be_recorded_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr(processes, "write_whole", full)
    with pytest.raises(OSError, match="No space left"), start_service(service("sleep 99.25")):
        pass
    assert not [one for one in psutil.process_iter(["cmdline"]) if "sleep 99.25" in " ".join(one.info["cmdline"] or [])]


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # more than any machine's memory; a sparse file takes no room
    with log.open("ab") as file:
        file.write("\nkein Öl\nno data\n".encode())
    with subprocess.Popen("true") as process:
        assert Started(process, log).last_lines().endswith("\n    kein Öl\n    no data")


def test_our_own_command_is_found_without_an_activated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = [folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "ajet").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(bare))
    address = ("127.0.0.1", free_port())
    where = "command -v ajet || command -v python"  # the tests' environment may lack the first
    with start_service(service(f"{where}; {listening(address[1])}", address=address)):
        (log,) = Path("state").glob("world-*.log")
        assert Path(log.read_text().splitlines()[0]).parent == Path(sys.executable).parent


def test_one_that_is_running_is_used_by_commands_that_are_no_run(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    keys = {"command": listening(port), "address": f"127.0.0.1:{port}"}
    config = make_config({"services.w": keys})
    with yaml_services(config, use_running=True):
        said = capfd.readouterr()
        assert "started w" in said.err and not said.out
        with yaml_services(config, use_running=True):
            socket.create_connection(("127.0.0.1", port)).close()
        assert "started" not in capfd.readouterr().err
        socket.create_connection(("127.0.0.1", port)).close()
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_no_run_ends_its_services_when_it_is_ended(number: signal.Signals) -> None:
    before = set(psutil.Process().children(recursive=True))
    handled = signal.signal(number, signal.SIG_DFL)  # under `nohup`, SIGHUP is ignored
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            yaml_services(make_config({"services.w": {"command": "sleep 99 & sleep 98"}})),
        ):
            assert set(psutil.Process().children(recursive=True)) - before
            signal.raise_signal(number)
    finally:
        signal.signal(number, handled)
    assert not set(psutil.Process().children(recursive=True)) - before


@pytest.mark.parametrize(
    ("command", "limit", "complaint"),
    [
        ("sleep 0.4; echo no data >&2; exit 3", 30, "(?s)exit code 3 before it answered at .*no data"),
        ("sleep 99", 0.5, "did not answer at 127.0.0.1:[0-9]+ within 0.5 s"),
    ],
)
def test_one_that_never_answers(command: str, limit: float, complaint: str) -> None:
    address = ("127.0.0.1", free_port())
    with (
        pytest.raises(ServiceError, match=complaint),
        start_service(service(command, address=address, start_timeout_s=limit)),
    ):
        raise AssertionError("it has not started")


def test_one_whose_address_is_taken_is_not_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = ("127.0.0.1", listener.getsockname()[1])
        with (
            pytest.raises(ServiceError, match=r"something answers at 127\.0\.0\.1:[0-9]+ already"),
            start_service(service("touch started", address=address)),
        ):
            raise AssertionError("it has not started")
    assert not Path("started").exists()


def test_services_of_the_yaml_and_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.yaml").write_text(
        "ajet:\n  services:\n    world: {command: serve, address: 'http://localhost:81', env: {A: b}, restarts: 7}\n"
        "  rollout: {environment: {url: 'http://127.0.0.1:8123'}}\n"
    )
    config = load_config("run.yaml", complete=False)
    Path(".env").write_text("# mine\nexport SHOP_PATH=.\nSHOP_SCRIPT='bash shop.sh'\nSHOP_URL=ignored\n")
    monkeypatch.setenv("SHOP_URL", "localhost:7")
    monkeypatch.setenv("TOWN_PATH", "/town")
    monkeypatch.setenv("TOWN_SCRIPT", "town")
    world, shop, town = wanted_services(config, ["shop", "world", "town"])
    assert world == Service("world", "ajet.services.world", "serve", Path(), ("localhost", 81), 600.0, {"A": "b"}, 7)
    assert (shop.command, shop.folder, shop.address) == ("bash shop.sh", Path(), ("localhost", 7))
    assert shop.env["SHOP_PATH"] == "." and "SHOP_URL" not in shop.env  # what is set already stays
    assert town.address == ("127.0.0.1", 8123)  # where the run expects its environments
    with pytest.raises(ServiceError, match=r"NOWHERE_PATH is not set, nor is it in \.env"):
        wanted_services(config, ["nowhere"])
    with pytest.raises(ServiceError, match=r"ajet.services.w.address: 'there' is not an address"):
        wanted_services(make_config({"services.w": {"command": "x", "address": "there"}}), [])


def test_a_mistyped_key_of_a_service_is_explained() -> None:
    Path("run.yaml").write_text("ajet:\n  services:\n    world: {command: serve, adress: x}\n")
    with pytest.raises(
        ConfigError,
        match=r"run.yaml:3: ajet.services.world.adress: unknown key\s+did you mean `ajet.services.world.address`",
    ):
        load_config("run.yaml", complete=False)
    Path("run.yaml").write_text("ajet:\n  services:\n    world: {folder: x}\n")
    with pytest.raises(ConfigError, match=r"ajet.services: world has no `command`"):
        load_config("run.yaml", complete=False)
    Path("run.yaml").write_text("ajet: {}\n")
    with pytest.raises(
        ConfigError, match=r"services\.w\.restarts: -1 is not allowed\s+expected a whole number.*0.*; default: 3"
    ):
        load_config("run.yaml", ["services.w.command=x", "services.w.restarts=-1"], complete=False)


# ---------------------------------------------------------------- services that end during a run


def starts() -> int:
    return Path("starts").read_text().count("\n") if Path("starts").exists() else 0


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if text in record.getMessage()]


def warned(caplog: pytest.LogCaptureFixture) -> bool:
    return any(record.levelno >= logging.WARNING for record in caplog.records)


def test_it_is_started_again_and_its_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    command = "echo >> starts; until test -e stop; do sleep 0.05; done; rm stop; echo out of memory; exit 9"
    with start_service(service(command)):
        assert not warned(caplog)
        Path("stop").touch()
        wait_until(lambda: starts() == 2)
        (record,) = said(caplog, "ended with exit code 9")
        assert "out of memory" in record.getMessage() and "start 1 of 3 follows" in record.getMessage()
        wait_until(lambda: len(still_running()) == 1)
    assert still_running() == []


def test_one_that_always_ends_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with start_service(service("echo >> starts; sleep 0.3; exit 9", restarts=2)):
        wait_until(lambda: bool(said(caplog, "episodes that need it will fail")))
    assert starts() == 3
    (last,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "started again 2 times already" in last.getMessage()
    assert still_running() == []


def test_one_that_may_not_be_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with start_service(service("echo >> starts; sleep 0.3; exit 9", restarts=0)):
        wait_until(lambda: bool(said(caplog, "may not be started again")))
    assert starts() == 1


def test_one_that_never_answers_again_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """It listens the first time only; the run can end while it's waited for."""
    address = ("127.0.0.1", free_port())
    listen = f"import socket, time; s = socket.create_server({address!r}); time.sleep(0.5); raise SystemExit(3)"
    command = f'if test -e starts; then echo >> starts; exit 4; fi; echo >> starts; {sys.executable} -c "{listen}"'
    with start_service(service(command, address=address, restarts=2)):
        wait_until(lambda: bool(said(caplog, "episodes that need it will fail")))
    assert starts() == 3
    assert said(caplog, "exit code 4")


def test_one_in_the_background_is_watched_at_its_address(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "ASK_S", 0.05)
    address = ("127.0.0.1", free_port())
    listen = f"import os, socket, time; s = socket.create_server({address!r}); open('pid', 'w').write(str(os.getpid()))"
    command = f'echo >> starts; {sys.executable} -c "{listen}; time.sleep(99)" & exit 0'
    with start_service(service(command, address=address)):
        wait_until(lambda: Path("pid").exists() and Path("pid").read_text() != "")
        os.kill(int(Path("pid").read_text()), signal.SIGKILL)
        wait_until(lambda: starts() == 2)
        assert said(caplog, "answers no more")


def test_a_command_that_is_done_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with start_service(service("echo >> starts")):
        wait_until(lambda: starts() == 1)
    assert starts() == 1 and not warned(caplog)


def test_the_run_can_end_during_a_pause(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "FIRST_PAUSE_S", 600.0)
    with start_service(service("echo >> starts; sleep 0.3; exit 9")):
        wait_until(lambda: bool(said(caplog, "start 1 of 3")))
    assert starts() == 1


KILLER = """
import os, signal
from pathlib import Path

from ajet import Workflow, WorkflowOutput

class Killer(Workflow):
    async def execute(self, workflow_task, tuner):
        client = tuner.as_raw_openai_sdk_client()
        await client.chat.completions.create(model="any", messages=list(workflow_task.task.init_messages))
        if not Path("killed").exists():
            Path("killed").touch()
            os.kill(int(Path("pid").read_text()), signal.SIGKILL)
        *_, done, _ = workflow_task.gym_env.step("one")
        return WorkflowOutput(reward=1.0, metadata={"done": done})
"""


@pytest.mark.slow
def test_an_episode_on_a_killed_service_is_run_again_on_the_next(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    world = SUPPORT / "worlds.py"
    Path("agent.py").write_text(textwrap.dedent(KILLER))
    Path("replies.yaml").write_text(json.dumps(["one"] * 4))
    serving = f"echo $$ > pid; exec {sys.executable} -m ajet env serve '{world}->Counter' --port {port} --workers 1"
    config = {
        "services": {"world": {"command": serving, "address": f"127.0.0.1:{port}"}},
        "task_reader": {"type": "random_dummy"},
        "rollout": {
            "user_workflow": "agent.py->Killer",
            "engine": "scripted",
            "scripted_replies": "replies.yaml",
            "environment": {"url": f"http://127.0.0.1:{port}"},
            "episode_retries": 5,
            "compute_madness_checklist": [],
        },
    }
    Path("run.yaml").write_text(json.dumps({"ajet": config}))
    loaded = load_config("run.yaml", backbone="debug")
    (wanted,) = wanted_services(loaded, [])
    with start_service(wanted), Runtime(loaded) as runtime:
        episode = runtime.run(runtime.pool.run_episode(Task(task_id="t")))
    assert episode.status is EpisodeStatus.COMPLETED and episode.failure is None
    assert Path("killed").exists() and said(caplog, "was ended by SIGKILL")
    assert still_running() == []
