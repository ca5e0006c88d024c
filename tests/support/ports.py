"""Ports for what a test starts."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of this machine that nothing uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
