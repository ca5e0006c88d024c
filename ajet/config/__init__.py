"""What a run is told: the typed schema (one source of keys, defaults and documentation) and the loader."""

from __future__ import annotations

from ajet.config.make import make_config
from ajet.config.root import AjetConfig, BackboneName, Config
from ajet.config.section import Block, Section

__all__ = ["AjetConfig", "BackboneName", "Block", "Config", "Section", "make_config"]
