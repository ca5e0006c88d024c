"""vLLM as the engine, on servers that we start, watch and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.engine.vllm.server import SERVER_MODULE as SERVER_MODULE
    from ajet.engine.vllm.server import VllmSettings as VllmSettings
    from ajet.engine.vllm.server import server_arguments as server_arguments
    from ajet.engine.vllm.server import server_environment as server_environment

__getattr__ = lazily(
    __name__,
    {
        "SERVER_MODULE": "server",
        "VllmSettings": "server",
        "server_arguments": "server",
        "server_environment": "server",
    },
)
