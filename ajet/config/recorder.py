"""`ajet.recorder`: which episodes are kept for the viewer."""

from __future__ import annotations

from typing import Literal

from ajet.config.section import Section
from ajet.config.types import AboveZero, Positive


class RecorderConfig(Section):
    """`ajet.recorder`: which episodes are kept for the viewer."""

    keep: Literal["all", "every_n", "failures"] = "all"
    """All episodes, those of every n-th step, or only failed ones."""
    every_n: Positive = 10
    """With `keep: every_n`: the n."""
    max_gb: AboveZero = 10.0
    """Size at which the oldest episodes make room."""
