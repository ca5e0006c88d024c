"""What forked processes do before anything else, and how the server that forks them ends."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

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
