"""Loaded by verl in every process, through the `verl.plugins` entry point. Registers by name what a run needs.

verl only logs, at debug level, when an entry point fails. A failure is seen all the same: without this module a process
knows neither our loss nor our estimator, and verl ends naming them; our own processes import it first and so raise
what went wrong; and the driver checks that the entry point exists.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from ajet.backbone.ray.start import on_cpu
from ajet.backbone.ray.verl.config import ADVANTAGE_ESTIMATOR, VERL_PLATFORM
from ajet.schema.errors import MissingDependencyError

ENTRY_POINT_GROUP = "verl.plugins"


def require_entry_point() -> None:
    """Raise if verl would not find this module."""
    if not any(entry.value == __name__ for entry in entry_points(group=ENTRY_POINT_GROUP)):
        raise MissingDependencyError(
            "verl would not load ajet: the entry point in the group `verl.plugins` is missing, because ajet runs from "
            "a folder that is not installed\n    run `pip install -e .` there (on every node)"
        )


def _load() -> None:
    if on_cpu():
        os.environ[VERL_PLATFORM] = "cpu"  # read when the platform is first asked for
        from ajet.backbone.ray.verl import cpu_platform

        cpu_platform.register()
    from ajet.backbone.ray.verl import train_engine  # imports verl for the platform that is known by now

    train_engine.register("cpu" if on_cpu() else "cuda", ADVANTAGE_ESTIMATOR)


_load()
