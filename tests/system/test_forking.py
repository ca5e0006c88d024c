"""What forked processes do before anything else, and how the server that forks them ends."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ajet.system import forking
from ajet.system.forking import ForkingClient

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
