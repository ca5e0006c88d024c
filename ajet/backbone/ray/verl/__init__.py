"""The verl backbone: scale out on verl and Ray. `run(config, experiment, options) -> int` is one run.

Importing this needs neither verl nor torch; without the extra, a run says how to install it.
"""

from __future__ import annotations

from ajet.backbone.ray.verl.adapter import planned_notes, run, show_config

__all__ = ["planned_notes", "run", "show_config"]
