"""AdamW with float32 states whatever the model's dtype, and the learning rate as a function of the step.

Where weights have a float32 copy, the update goes through them in groups, so that the float32 gradients of all weights
never exist together. With `in_main_memory`, copies and states of a GPU's weights stay in main memory, and the CPU
computes the update. With `master: none`, a copy exists only while its group is updated, and what bfloat16 can't hold is
rounded at random: up or down, each as often as the exact value is near, so that small steps add up on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from ajet.schema.errors import MissingDependencyError
from ajet.schema.install import install_command

GROUP_BYTES = 256 * 2**20
"""Float32 gradients that exist at a time."""
FLOAT16_SCALE = 1024.0
"""What a loss is multiplied by, and gradients are divided by in float32, if the model computes in float16: the gradient
of a token that weighs 1e-5 is mostly below the smallest number there is, and would be 0. A gradient that is too large
for it lowers it."""
SCALE_DOUBLES_AFTER = 100
"""Updates, where it was lowered: one unlucky batch shouldn't cost a run its small gradients."""


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """How the weights are updated."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """Maximum gradient norm."""
    state_bits: Literal[32, 8] = 32
    """8: the moments of large parameters in blocks of 8-bit numbers, by bitsandbytes."""
    master: Literal["float32", "none"] = "float32"
    """Whether bfloat16 weights have a lasting float32 copy. Those in float16 always do."""
    in_main_memory: bool = False
    """Keep float32 copies and states in main memory."""
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    total_steps: int = 0
    """Where `cosine` and `linear` end."""
    min_lr_ratio: float = 0.0
    """Their last learning rate, as a share of `lr`."""

    def lr_at(self, step: int) -> float:
        """The learning rate of a training step, for all its updates; the first step is 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps <= self.warmup_steps:
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The result of one optimiser step."""

    grad_norm: float
    applied: bool
    """False if the gradient was not finite: the weights are unchanged."""


def adam_8bit() -> Any:
    """bitsandbytes' AdamW with 8-bit moments."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise MissingDependencyError(
            f"ajet.trainer_common.optim.state_bits: 8 needs bitsandbytes ({error}): {install_command('bitsandbytes')}"
        ) from error
    return AdamW8bit


class MasterAdamW:
    """AdamW over named parameters. Half-precision parameters have a float32 master copy with the exact values, unless
    `master` is `none`."""

    def __init__(self, named: Iterable[tuple[str, Parameter]], settings: OptimSettings) -> None:
        self.settings = settings
        every = dict(named)
        self.in_float16 = any(each.dtype is torch.float16 for each in every.values())
        self.loss_scale = FLOAT16_SCALE if self.in_float16 else 1.0
        """The factor of the losses whose gradients `step` gets."""
        self.parameters = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
        if not self.parameters:
            raise ValueError("the model has no trainable parameter")
        self._passing = {name for name, each in self.parameters.items() if self._is_passing(each)}
        """Those whose copy exists only during an update; at other times its place is empty."""
        self._masters = {name: self._master(name) for name in self.parameters}
        decayed = [self._masters[name] for name, each in self.parameters.items() if each.dim() > 1]
        plain = [self._masters[name] for name, each in self.parameters.items() if each.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
        if settings.state_bits == 32:
            # one weight after the other: all at once would take as much memory again as the weights; a CPU's kernel
            # goes over each once
            on_cpu = all(master.device.type == "cpu" for master in self._masters.values())
            self._adam = torch.optim.AdamW(groups, foreach=False, fused=on_cpu, **common)
        else:
            self._adam = adam_8bit()(groups, **common)

    def step(self, lr: float) -> OptimizerStep:
        """Clip the gradients, apply and clear them."""
        norm = self._clip()
        applied = math.isfinite(norm)
        if applied:
            for group in self._adam.param_groups:
                group["lr"] = lr
            separate = [name for name, master in self._masters.items() if master is not self.parameters[name]]
            if len(separate) < len(self._masters):
                for name in self._masters.keys() - set(separate):
                    self._unscale(self.parameters[name].grad)
                self._adam.step()
                self.clear(set(self._masters) - set(separate))
            for names in self._groups(separate):
                self._step_masters(names)
            if self.in_float16 and self._count() % SCALE_DOUBLES_AFTER == 0:
                self.loss_scale = min(FLOAT16_SCALE, 2 * self.loss_scale)
        else:
            self.loss_scale = max(1.0, self.loss_scale / 16)
        self.clear(self._masters)
        return OptimizerStep(norm, applied)

    def _clip(self) -> float:
        """Limit the gradient's norm, and return what it was. float16 could not hold the sum of the scaled squares."""
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        norms = [
            torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in gradients
        ]
        norm = torch.nn.utils.get_total_norm(norms)
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.settings.clip_grad * self.loss_scale, norm)
        return float(norm) / self.loss_scale

    def _unscale(self, gradient: Tensor | None) -> None:
        if gradient is not None and self.loss_scale != 1.0:
            gradient /= self.loss_scale

    def _step_masters(self, names: list[str]) -> None:
        """Update float32 copies, and the weights from them."""
        for name in names:
            gradient, master = self.parameters[name].grad, self._masters[name]
            if name in self._passing:
                master.data = self.parameters[name].detach().to(master.device, torch.float32)
            master.grad = None if gradient is None else gradient.to(master.device, master.dtype)
            self._unscale(master.grad)
            self.parameters[name].grad = None
        self._adam.step()
        with torch.no_grad():
            for name in names:
                master = self._masters[name]
                master.grad = None
                if name in self._passing:
                    _round_at_random(master, self._seed(name))
                self.parameters[name].copy_(master)
                if name in self._passing:
                    master.data = master.new_empty(0)

    def _count(self) -> int:
        """The updates so far, those before a resume included."""
        return max((int(state["step"]) for state in self._adam.state.values()), default=1)

    def _seed(self, name: str) -> int:
        """The seed of a weight's rounding. It differs for every weight and step, and is the same after a resume."""
        step = self._adam.state.get(self._masters[name], {}).get("step", 0)
        return int(step) * len(self.parameters) + list(self.parameters).index(name)

    def _groups(self, names: list[str]) -> Iterator[list[str]]:
        """Names of weights whose float32 gradients together take at most `GROUP_BYTES`, or of a single one."""
        group: list[str] = []
        size = 0
        for name in names:
            more = 4 * self.parameters[name].numel()
            if group and size + more > GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append(name)
            size += more
        if group:
            yield group

    def _is_passing(self, parameter: Parameter) -> bool:
        return self.settings.master == "none" and parameter.dtype is torch.bfloat16

    def _master(self, name: str) -> Tensor:
        """What the update is computed for: the parameter itself, if it is in float32 and where it should be."""
        parameter = self.parameters[name]
        device = torch.device("cpu") if self.settings.in_main_memory else parameter.device
        if name in self._passing:
            return torch.empty(0, dtype=torch.float32, device=device)
        if parameter.dtype in (torch.float32, torch.float64) and device.type == parameter.device.type:
            return parameter
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return parameter.detach().to(device, dtype, copy=True)

    def clear(self, names: Iterable[str]) -> None:
        """Forget the gradients of these."""
        for name in names:
            self.parameters[name].grad = self._masters[name].grad = None

    def rest(self) -> None:
        """Move the state to host memory until `wake`."""
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        """Bring the state back to where the parameters are."""
        self._move(next(iter(self.parameters.values())).device)

    def _move(self, device: torch.device) -> None:
        """The moments and the master copies; step counters stay where they are."""
        if self.settings.in_main_memory:  # where they always are
            return
        for name, master in self._masters.items():
            state = self._adam.state.get(master, {})
            for key, value in state.items():
                if key != "step" and isinstance(value, Tensor):
                    state[key] = value.to(device)
            if master is not self.parameters[name]:
                master.data = master.data.to(device)

    def tensors(self) -> dict[str, Tensor]:
        """The state as named tensors: `<parameter>|exp_avg`, …, and master copies as `<parameter>|master`."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._adam.state.get(master, {}).items():
                if key.startswith("qmap"):  # one table that all 8-bit states share; a file holds no shared tensors
                    value = value.clone()
                found[f"{name}|{key}"] = torch.tensor(value) if isinstance(value, int) else value
            if master is not self.parameters[name] and name not in self._passing:
                found[f"{name}|master"] = master
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`, once the weights are loaded. Copies that it lacks are made from them."""
        fields = {key.rsplit("|", 1)[1] for key in tensors}
        for bits, field in ((32, "exp_avg"), (8, "state1")):
            if field in fields and bits != self.settings.state_bits:
                now = self.settings.state_bits
                raise ValueError(f"its optimiser has {bits} bits, this run's {now}: trainer_common.optim.state_bits")
        with torch.no_grad():
            for name in set(self._masters) - self._passing:
                if f"{name}|master" not in tensors and self._masters[name] is not self.parameters[name]:
                    self._masters[name].copy_(self.parameters[name])
        for key, value in tensors.items():
            name, field = key.rsplit("|", 1)
            if name not in self._masters:
                raise ValueError(f"the optimiser state holds {name!r}, which this model does not train")
            master = self._masters[name]
            if field == "master":
                if name not in self._passing:
                    with torch.no_grad():
                        master.copy_(value)
            elif field == "step":  # PyTorch's AdamW keeps it as a tensor on the CPU, that of bitsandbytes as an int
                self._adam.state[master][field] = int(value) if self.settings.state_bits == 8 else value.clone()
            else:
                self._adam.state[master][field] = value.to(master.device).clone()


def _round_at_random(exact: Tensor, seed: int) -> None:
    """Round in place to bfloat16 stochastically: a value between two representable ones becomes either, the nearer one
    more often."""
    generator = torch.Generator(exact.device).manual_seed(seed)
    bits = exact.view(torch.int32)  # bfloat16 is the upper half of float32
    bits.add_(torch.randint(0, 1 << 16, bits.shape, generator=generator, device=exact.device, dtype=torch.int32))
    bits.bitwise_and_(-(1 << 16))
