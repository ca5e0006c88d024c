"""The clean process from which a server of environments forks one process per instance (see `ajet.system.forking`).

It imports the user's class once and never makes an environment itself.
"""

from __future__ import annotations

import resource
import socket
import sys
from pathlib import Path
from typing import Any

from ajet.environment.instance_process import serve_instance
from ajet.environment.source import EnvironmentSettings, find_source
from ajet.system.forking import ForkingServer, serve


def main(control_fd: int) -> None:
    """Serve until the control socket closes."""
    serve(control_fd, _InstanceServer)


class _InstanceServer(ForkingServer):
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
