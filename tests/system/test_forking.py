"""What forked processes do before anything else, and how the server that forks them ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ajet.system import forking
from ajet.system.forking import ForkingClient
from support import TESTS
from support.detached import is_gone
from support.waiting import wait_until

pytestmark = pytest.mark.anyio

PROGRAM = """
import sys
import numpy
from ajet.system.forking import reseed

before = "numpy.random" in sys.modules
reseed()
assert ("numpy.random" in sys.modules) == before, "it was imported for nothing"
numpy.random.seed(1)
first = numpy.random.random()
numpy.random.seed(1)
reseed()
assert numpy.random.random() != first
"""


def test_numbers_are_new_and_nothing_is_imported_for_them() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


SERVER = """
import sys
from ajet.system.forking import ForkingServer, serve

class Server(ForkingServer):
    descriptors, threads_warning = 0, ""

    def facts(self):
        return {"a fact": 1}

serve(int(sys.argv[1]), lambda control, setup: Server(control))
"""


@pytest.mark.parametrize("reads", [True, False])
def test_it_ends_quietly_when_the_other_end_does(reads: bool) -> None:
    """Also when that was killed, and had not read everything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
    assert program.stdin is not None
    program.stdin.write(b"{}")
    program.stdin.close()
    program.stdin = None
    assert b'"ready"' in ours.recv(65536, socket.MSG_PEEK)
    if reads:
        ours.recv(65536)
    ours.close()
    _, said = program.communicate(timeout=60)
    assert (program.returncode, said) == (0, b"")


SLEEPER = """
import time
from ajet.system.forking import ForkingServer

class Sleeper(ForkingServer):
    descriptors, threads_warning = 1, ""

    def __init__(self, control, setup):
        super().__init__(control)

    def child(self, descriptor):
        time.sleep(600)
        return 0
"""


async def test_hundreds_are_started_and_killed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the socket holds, before the server has its turn."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forking, "EXIT_NOTICE_S", 60.0)

    server = ForkingClient(("sleeper", "Sleeper"), {})
    await server.ready()
    reading, writing = os.pipe()
    try:
        processes = [server.start(writing) for _ in range(400)]
        os.close(writing)
        for process in processes:
            server.command("kill", process)
        async with asyncio.timeout(60):  # the end of the pipe: no copy of its other end is left
            assert await asyncio.to_thread(os.read, reading, 1) == b""
        ends = await asyncio.gather(*map(server.exit_of, processes))
        assert ends == ["was killed by SIGKILL"] * 400
    finally:
        server.close()
        os.close(reading)


def test_closed_while_it_imports_it_leaves_nothing_to_complain_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_server.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    complaints = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        client = ForkingClient(("slow_server", "Server"), {})
        with pytest.raises(TimeoutError):  # Ctrl-C cancels it as well
            await asyncio.wait_for(client.ready(), 0.1)
        client._process.kill()
        client.close()
        del client
        gc.collect()

    asyncio.run(main())
    assert not complaints


# ---------------------------------------------------------------- the workers of a runner: real forks, in a program

WORKERS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from ajet.system.forking import ForkedWorkers
from support import TESTS
from support.detached import detach

folder = Path(sys.argv[1])

def body(number, runner):
    assert os.getppid() == runner
    if number == 0:
        detach(str(folder / "detached"))
        left = subprocess.Popen(["sleep", "600"])
        (folder / "left").write_text(str(left.pid))
        return 3
    if number == 1:
        raise ValueError("mine")
    (folder / "waits").write_text(str(os.getpid()))
    time.sleep(600)

workers = ForkedWorkers(body)
signal.signal(signal.SIGTERM, lambda *_: workers.stop())
for number in range(3):
    workers.start(number)
subprocess.Popen(["true"])  # no worker: reaped, and nothing said
while workers:
    print(*workers.wait(), flush=True)
workers.start(4)
print("left:", len(workers))
"""


def test_workers_end_and_are_told_apart(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", WORKERS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    first = sorted(program.stdout.readline() for _ in range(2))
    assert first == ["0 3\n", "1 1\n"], "the exit code, and 1 for an exception"
    left = int((tmp_path / "left").read_text())
    wait_until(lambda: is_gone(left) and is_gone(int((tmp_path / "detached").read_text())))
    wait_until((tmp_path / "waits").exists)
    os.kill(program.pid, signal.SIGTERM)
    out, err = program.communicate(timeout=60)
    assert out == f"2 {-signal.SIGTERM}\nleft: 0\n", "after stop, none starts"
    assert "ValueError: mine" in err
