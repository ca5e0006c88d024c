"""What a mapping to verl's or Trinity's configuration must know of the machines, and what it has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Machine:
    """What the mapping must know of the machines."""

    platform: Literal["cuda", "cpu"] = "cuda"
    flash_attention: bool = True
    """Whether flash-attn is installed: sequences are packed without padding only with it."""

    logical_gpus: int = 1
    """What Ray is told of GPUs where there is none: trainers and engines ask for them."""

    @property
    def cpu(self) -> bool:
        return self.platform == "cpu"


@dataclass(frozen=True, slots=True)
class Note:
    """One of our keys that the backbone honours in part, or not at all."""

    key: str
    message: str
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"
