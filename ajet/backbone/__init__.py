"""Who owns the loop: `ajet.backbone.<name>.run(config, experiment, options) -> int` is one run.

`options` is what the command line asks for besides the config; the result is the exit code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet.observe.progress import ProgressMode


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Flags of `ajet --conf …` that concern a backbone."""

    ray_cluster: bool = False
    """`--with-ray-cluster`: join or start a cluster as the environment variables say."""
    ray_address: str | None = None
    """`--ray-address`: a Ray that is already running. Without either, as with `--with-ray`, a run starts its own."""
    skip_check_avail_gpu: bool = False
    quiet: bool = False
    json: bool = False
    viewer: str = ""
    """Where the run can be looked at: the viewer's address, or the command that starts one."""

    def progress_mode(self) -> ProgressMode:
        """How progress is shown."""
        from ajet.observe.progress import ProgressMode

        if self.json:
            return ProgressMode.JSON
        return ProgressMode.QUIET if self.quiet else ProgressMode.AUTO
