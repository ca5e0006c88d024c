"""The verl backbone: scale out on verl and Ray. `run(config, experiment, options) -> int` is one run.

Importing this needs neither verl nor torch; a run without the extra says how to get it.
"""

from __future__ import annotations

from ajet.backbone.ray.verl.launcher import run
from ajet.backbone.ray.verl.show import show_config

__all__ = ["run", "show_config"]
