"""The trinity backbone: train on Trinity-RFT and Ray, explorer and trainer apart. `run(config, experiment, options)`.

Importing this needs neither Trinity nor torch; without the extra, a run says how to install it.
"""

from __future__ import annotations

from ajet.backbone.ray.trinity.adapter import planned_notes, run, show_config

__all__ = ["planned_notes", "run", "show_config"]
