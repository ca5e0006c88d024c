"""Which keys of loss and optimiser verl and Trinity can't honour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ajet.backbone.ray.mapping import Note
from ajet.backbone.training_settings import KL_TYPES

if TYPE_CHECKING:
    from ajet.config import Config

PLACE = "ajet.trainer_common"


def verl_notes(config: Config) -> Iterator[Note]:
    """Those of verl."""
    yield from _of_both(config, "verl")
    correction = config.ajet.trainer_common.algorithm.rollout_correction
    if correction.mode == "sequence_tis" or (correction.mode == "masked" and correction.level == "sequence"):
        yield Note(
            f"{PLACE}.algorithm.rollout_correction.mode",
            "verl sees one row at a time: where one agent of an episode gives several rows, each has its own ratio",
        )


def trinity_notes(config: Config) -> Iterator[Note]:
    """Those of Trinity."""
    yield from _of_both(config, "Trinity")
    common = config.ajet.trainer_common
    if common.algorithm.rollout_correction.mode in ("sequence_tis", "masked"):
        yield Note(
            f"{PLACE}.algorithm.rollout_correction.mode",
            "with Trinity the ratio of the loss is to the sampler itself, so there is nothing to correct: leave it out",
            refused=True,
        )
    if common.ppo_epochs > 1:
        yield Note(f"{PLACE}.ppo_epochs", "Trinity's trainer passes over a batch once", refused=True)
    if common.optim.eps != type(common.optim)().eps:
        yield Note(f"{PLACE}.optim.eps", "Trinity does not pass it to the optimiser", refused=True)


def _of_both(config: Config, title: str) -> Iterator[Note]:
    common = config.ajet.trainer_common
    if common.use_kl_loss and common.kl_loss_coef and common.kl_loss_type not in KL_TYPES:
        yield Note(f"{PLACE}.kl_loss_type", f"available: {', '.join(KL_TYPES)}", refused=True)
    if common.algorithm.distillation.teacher is not None:
        yield Note(f"{PLACE}.algorithm.distillation.teacher", "only `local` learns from a teacher", refused=True)
    if common.algorithm.replay.groups:
        yield Note(f"{PLACE}.algorithm.replay.groups", "only `local` trains past groups once more", refused=True)
    if common.kl_reference_sync:
        yield Note(f"{PLACE}.kl_reference_sync", f"{title}'s reference stays the starting model", refused=True)
    if common.kl_adaptive.target is not None:
        yield Note(f"{PLACE}.kl_adaptive.target", f"{title}'s KL term has a fixed coefficient", refused=True)
    if config.ajet.model.lora.base_bits is not None:
        yield Note("ajet.model.lora.base_bits", f"{title} keeps the base weights whole", refused=True)
    if common.optim.state_bits != 32:
        yield Note(f"{PLACE}.optim.state_bits", f"{title} keeps the optimiser's state in 32 bits", refused=True)
    if common.optim.master != "float32":
        yield Note(f"{PLACE}.optim.master", f"{title} keeps the trained weights in float32", refused=True)
