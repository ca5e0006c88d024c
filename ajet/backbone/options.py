"""`LaunchOptions`: what the command line asked for besides the config, for backbones that start processes of their own.

A backbone is `run(config, experiment)` or, if it needs these, `run(config, experiment, options)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet.observe.progress import ProgressMode


class RayStart(StrEnum):
    """Where Ray comes from."""

    NONE = "none"
    PRIVATE = "private"
    """`--with-ray`: a private one on this machine, stopped with the run."""
    CLUSTER = "cluster"
    """`--with-ray-cluster`: join or start a cluster by environment variables."""
    ADDRESS = "address"
    """`--ray-address`: one that is already running."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Flags of `ajet --conf …` that concern a backbone."""

    ray: RayStart = RayStart.NONE
    ray_address: str | None = None
    skip_check_avail_gpu: bool = False
    quiet: bool = False
    json: bool = False

    def progress_mode(self) -> ProgressMode:
        """How progress is shown."""
        from ajet.observe.progress import ProgressMode

        if self.json:
            return ProgressMode.JSON
        return ProgressMode.QUIET if self.quiet else ProgressMode.AUTO
