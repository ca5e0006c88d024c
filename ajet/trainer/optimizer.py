"""AdamW with float32 states whatever the model's dtype, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """How the weights are updated."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """Maximum gradient norm."""
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    total_steps: int = 0
    """Where `cosine` and `linear` reach 0."""

    def lr_at(self, step: int) -> float:
        """The learning rate of an update; the first has step 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps <= self.warmup_steps:
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.lr * (0.5 * (1.0 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimiser step."""

    grad_norm: float
    applied: bool
    """False if the gradient was not finite: the weights are unchanged."""


class MasterAdamW:
    """AdamW over named parameters. Half-precision parameters have a float32 master copy with the exact values."""

    def __init__(self, named: Iterable[tuple[str, Parameter]], settings: OptimSettings) -> None:
        self.settings = settings
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        if not self.parameters:
            raise ValueError("the model has no trainable parameter")
        self._masters = {
            name: parameter if parameter.dtype in (torch.float32, torch.float64) else parameter.detach().float()
            for name, parameter in self.parameters.items()
        }
        decayed = [self._masters[name] for name in self.parameters if self._masters[name].dim() > 1]
        plain = [self._masters[name] for name in self.parameters if self._masters[name].dim() <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)

    def step(self, number: int) -> StepResult:
        """Clip the gradients, apply and clear them."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip_grad))
        applied = math.isfinite(norm)
        if applied:
            for group in self._adam.param_groups:
                group["lr"] = self.settings.lr_at(number)
            separate = [name for name, master in self._masters.items() if master is not self.parameters[name]]
            for name in separate:
                gradient = self.parameters[name].grad
                self._masters[name].grad = None if gradient is None else gradient.float()
            self._adam.step()
            with torch.no_grad():
                for name in separate:
                    self.parameters[name].copy_(self._masters[name])
        self.clear()
        return StepResult(norm, applied)

    def clear(self) -> None:
        """Forget all gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self._masters[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The state as named tensors: `<parameter>|exp_avg`, …, and master copies as `<parameter>|master`."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._adam.state.get(master, {}).items():
                found[f"{name}|{key}"] = value
            if master is not self.parameters[name]:
                found[f"{name}|master"] = master
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for key, value in tensors.items():
            name, field = key.rsplit("|", 1)
            if name not in self._masters:
                raise ValueError(f"the optimiser state holds {name!r}, which this model does not train")
            master = self._masters[name]
            if field == "master":
                with torch.no_grad():
                    master.copy_(value)
            else:
                # AdamW keeps the step counter on the CPU
                device = value.device if field == "step" else master.device
                self._adam.state[master][field] = value.to(device).clone()
