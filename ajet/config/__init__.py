"""What a run is told: the typed schema (the one source of keys, defaults and documentation) and the loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.config.kinds import BackboneName
    from ajet.config.loader import load_config, make_config
    from ajet.config.root import AjetConfig, Config

__all__ = ["AjetConfig", "BackboneName", "Config", "load_config", "make_config"]

# agents and tools on their own look names up in `kinds`, and need no schema
__getattr__ = lazily(
    __name__,
    {
        "AjetConfig": "root",
        "BackboneName": "kinds",
        "Config": "root",
        "load_config": "loader",
        "make_config": "loader",
    },
)
