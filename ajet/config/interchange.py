"""`ajet.interchange`: accepted for existing files. The gateway is always available and needs none of it."""

from __future__ import annotations

from typing import Literal

from ajet.config.section import Section
from ajet.config.types import Port, Positive


class InterchangeServerConfig(Section):
    """`interchange_server`: accepted for existing files; see `ajet.gateway`."""

    interchange_method: Literal["ipc", "tcp"] = "ipc"
    """Accepted for existing files."""
    interchange_server_port: Port | Literal["auto"] = "auto"
    """Accepted for existing files; see `gateway.port`."""
    num_fastapi_process: Positive = 2
    """Accepted for existing files."""
    max_fastapi_threads: Positive = 512
    """Accepted for existing files."""
    max_inference_tracker_threads: Positive = 64
    """Accepted for existing files."""


class InterchangeConfig(Section):
    """`ajet.interchange`: accepted for existing files. The gateway is always available and needs none of it."""

    enable_experimental_interchange_server: bool = False
    """Accepted for existing files."""
    interchange_server: InterchangeServerConfig = InterchangeServerConfig()
    """Accepted for existing files."""
