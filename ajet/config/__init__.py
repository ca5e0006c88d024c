"""What a run is told: the typed schema (the one source of keys, defaults and documentation) and the loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ajet.config.root import AjetConfig, BackboneName, Config
from ajet.config.section import Block, Section

if TYPE_CHECKING:
    from ajet.config.loader import load_config, make_config

__all__ = ["AjetConfig", "BackboneName", "Block", "Config", "Section", "load_config", "make_config"]


def __getattr__(name: str) -> Any:
    # the loader needs a YAML parser; code that only reads a config doesn't
    if name in ("load_config", "make_config"):
        from ajet.config import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
