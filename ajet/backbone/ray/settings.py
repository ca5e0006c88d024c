"""How many steps a run on Ray has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet.config import Config


def training_steps(config: Config, training_tasks: int) -> int:
    """Steps of the run: `total_training_steps`, or what `total_epochs` come to."""
    common = config.ajet.trainer_common
    if common.total_training_steps is not None:
        return common.total_training_steps
    return -(-common.total_epochs * training_tasks // config.ajet.data.train_batch_size)
