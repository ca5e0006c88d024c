"""Services beside a run: started, waited for, watched, ended; and what is wrong with one is said."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ajet.config import load_config, make_config
from ajet.schema.errors import ConfigError
from ajet.system import processes
from ajet.system.services import Service, ServiceError, Started, start_service, wanted_services, yaml_services
from support.ports import free_port
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AJET_STATE_DIR", str(tmp_path / "state"))


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

    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr(processes, "write_whole", full)
    with pytest.raises(OSError, match="No space left"), start_service(service("sleep 99")):
        pass
    assert not set(psutil.Process().children(recursive=True)) - before


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
