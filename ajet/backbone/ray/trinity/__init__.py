"""The trinity backbone: train on Trinity-RFT and Ray, explorer and trainer apart. `run(config, experiment, options)`.

Importing this needs neither Trinity nor torch; a run without the extra says how to get it.
"""

from __future__ import annotations

from ajet.backbone.ray.trinity.launcher import run
from ajet.backbone.ray.trinity.show import show_config

__all__ = ["run", "show_config"]
