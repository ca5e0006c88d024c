"""What the backbones on Ray (verl, trinity) share: Ray itself, the child that trains, rows and their credit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.backbone.ray.facts import Remark as Remark
    from ajet.backbone.ray.start import checked_address as checked_address
    from ajet.backbone.ray.verl.config import compose_verl_config as compose_verl_config

__getattr__ = lazily(
    __name__,
    {
        "Remark": "facts",
        "checked_address": "start",
        "compose_verl_config": "verl.config",
    },
)
