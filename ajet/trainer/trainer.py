"""`Updater`: updates the weights from a batch of call trees and their credit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ajet.engine.routing import following
from ajet.schema.episode import Call, CallTree
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit, LossNorm, mini_batches
from ajet.trainer.executor import (
    TOLERANCE,
    Chosen,
    CostModel,
    Logprobs,
    checkpointing,
    choose,
    follow_sampler,
    logprobs_of,
    plan,
)
from ajet.trainer.forward import Entropy, RowForward, require_liger
from ajet.trainer.loss import AdaptiveKL, EdgeTensors, LossSettings, policy_loss, trajectory_sums
from ajet.trainer.optimizer import MasterAdamW, OptimSettings
from ajet.trainer.pack import Item, Layout, Pack, items_of

log = logging.getLogger("ajet.trainer")

Batch = Sequence[tuple[CallTree, EpisodeCredit]]


class _Known(NamedTuple):
    """What is known of a batch's tokens before its first update."""

    old: Logprobs | None
    reference: Logprobs | None
    teacher: Logprobs | None


AUTO_TOKENS_CPU = 16384
"""Tokens of a pack on a CPU, where a longer pack gains nothing."""

AUTO_TOKENS_GPU = 65536


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a batch becomes an update."""

    loss: LossSettings = field(default_factory=LossSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    kl_adaptive: AdaptiveKL | None = None
    """Lets the KL coefficient follow a target. None: it stays as it is."""
    reference_sync: int = 0
    """Every this many steps the weights become the reference. 0: never."""
    mini_batches: int = 1
    """Parts of a batch; each gives one optimiser step."""
    epochs: int = 1
    """Passes over a batch."""
    max_tokens: int | None = None
    """Unique tokens per forward and backward pass. None: depends on the device."""
    logits_chunk: int | None = None
    """Most positions whose logits exist at a time. None: depends on the vocabulary. 0: no limit."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass, instead of keeping what it made."""
    compile: bool = False
    """Run the model's layers compiled."""
    liger: bool = False
    """Compute logprobs by Liger's kernel."""
    follows_sampler: bool = False
    """Send tokens to the experts that they went to when they were sampled."""
    seed: int = 0


class UpdateMeter:
    """Collects the metrics of one update."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.applied = 0
        self._steps = 0
        self._sums: dict[str, float] = {}

    def add(self, sums: dict[str, Tensor]) -> None:
        """The weighted sums of one pack."""
        for name, value in sums.items():
            number = float(value)
            if name.endswith("/max"):
                self._sums[name] = max(self._sums.get(name, -np.inf), number)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + number

    def step(self, grad_norm: float, applied: bool, lr: float) -> None:
        """One optimiser step."""
        self._steps += 1
        self.applied += applied
        self.values["train/grad_norm"] = grad_norm
        self.values["train/lr"] = lr
        weight = self._sums.get("weight/sum", 0.0) or 1.0
        for name, value in self._sums.items():
            if name == "weight/sum":
                continue
            if name.endswith("/max"):
                self.values[f"loss/{name.removesuffix('/max')}_max"] = value
            elif name == "total/sum":
                self.values["loss/total"] = value / self._steps
            else:
                self.values[f"loss/{name.removesuffix('/sum')}"] = value / weight

    def packs(self, packs: Sequence[Pack]) -> None:
        """Tokens computed, and what flat rows would have cost."""
        add = {
            "tokens/trained": sum(len(pack.edges) for pack in packs),
            "tokens/computed": sum(len(pack) for pack in packs),
            "tokens/as_flat_rows": sum(pack.unshared_tokens for pack in packs),
            "tokens/packs": len(packs),
        }
        routed = [pack.experts for pack in packs if pack.experts is not None]
        if routed:
            add["tokens/routed_as_sampled"] = sum(int((experts[:, 0, 0] >= 0).sum()) for experts in routed)
        for name, value in add.items():
            self.values[name] = self.values.get(name, 0.0) + value
        self.values["tokens/packing_ratio"] = self.values["tokens/as_flat_rows"] / self.values["tokens/computed"]


class Updater:
    """Trains a Hugging Face causal model in place: an engine that shares its parameters sees every update."""

    def __init__(self, model: Any, settings: TrainSettings, *, reference: Any = None) -> None:
        self.model = model
        self.settings = settings
        self.reference = reference
        """The frozen reference of the KL term. None with LoRA: the base weights are the reference."""
        self.updates = self.applied = 0
        """Optimiser steps so far, and those whose gradient was finite: the others left the weights as they were."""
        self.steps = 0
        """Batches so far, those without anything to train included."""
        self.kl_coef = settings.loss.kl_coef
        """The present coefficient of the KL term."""
        self.before: Logprobs = {}
        """Logprobs of the last batch under the weights before its update: the recorder stores them."""
        self.optimizer = MasterAdamW(model.named_parameters(), settings.optim)
        self._costs = CostModel.of(model)
        self._chosen: Chosen | None = None
        self._sampler_agrees: bool | None = None
        """Whether recorded logprobs are those of a forward pass. None: not compared yet."""
        device = next(model.parameters()).device
        if settings.liger:
            require_liger(device.type)
        self._device = device
        self.budget = settings.max_tokens or (AUTO_TOKENS_CPU if device.type == "cpu" else AUTO_TOKENS_GPU)
        """Unique tokens per pass."""
        self._wants_reference = settings.loss.kl_coef > 0 and not settings.loss.policy_loss.imitates
        if self._wants_reference and reference is None and not hasattr(model, "disable_adapter"):
            raise ValueError("a KL term needs a reference model (or a LoRA model, whose base is the reference)")
        self._dropouts = _adapter_dropouts(model)
        model.eval()

    @property
    def changes(self) -> int:
        """Grows whenever what a checkpoint holds changes."""
        return self.updates + self.steps

    # ------------------------------------------------------------------------------------------------ the update

    def update(
        self, batch: Batch, teacher: Logprobs | None = None, *, sampled_by_this: bool = False
    ) -> dict[str, float]:
        """Train on the batch. Returns metrics; `train/updates` is the number of optimiser steps taken.

        `teacher`: a teacher's logprobs of all trained tokens, for distillation.
        `sampled_by_this`: all tokens were sampled by this very model, as it is now. What was recorded of them then is
        π_old, if the first batch confirms it.
        """
        meter = UpdateMeter()
        self.before = {}
        items = items_of(batch)
        if items:
            norm = next(credit.norm for _, credit in batch if credit.trained)
            self._train(items, norm, teacher, sampled_by_this, meter)
        else:
            meter.values["tokens/trained"] = 0.0
        meter.values["train/updates"] = float(meter.applied)
        self._after_step(meter)
        return meter.values

    def _train(
        self, items: list[Item], norm: LossNorm, teacher: Logprobs | None, sampled_by_this: bool, meter: UpdateMeter
    ) -> None:
        """Every pass over the batch."""
        began = time.perf_counter()
        forward, layouts = self._executor(items)
        packs_of = [self._plan(part, layouts) for part in self._mini_batches(items, norm)]
        for packs in packs_of:
            meter.packs(packs)
        with self._checkpointing(), forward.session(self.model), self._following():
            first, *others = packs_of
            alone = self._yields_old(first)
            self.before |= self._old(forward, others if alone else packs_of, items, sampled_by_this)
            reference = self._reference_logprobs(forward, packs_of)
            meter.values["time/logprobs"] = time.perf_counter() - began
            began = time.perf_counter()
            for epoch in range(self.settings.epochs):
                if epoch:
                    packs_of = [self._plan(part, layouts) for part in self._mini_batches(items, norm)]
                for packs in packs_of:
                    old = None if alone and packs is first else self.before
                    self._step(forward, packs, _Known(old, reference, teacher), meter)
        meter.values["time/update"] = time.perf_counter() - began

    def _yields_old(self, first: list[Pack]) -> bool:
        """Whether the first mini-batch needs no pass for π_old: that of its update yields it."""
        spread = self.settings.loss.sums_sampler and len(first) > 1
        return not spread and not self._dropouts

    def _old(
        self, forward: RowForward, packs_of: list[list[Pack]], items: list[Item], sampled_by_this: bool
    ) -> Logprobs:
        """π_old of these packs: as the sampler recorded it, if that is the same, or from a forward pass."""
        if not packs_of:
            return {}
        dtype = next(self.model.parameters()).dtype
        if not sampled_by_this or self._sampler_agrees is False or dtype not in (torch.float32, torch.float64):
            return logprobs_of(list(chain(*packs_of)), forward, self.model)
        recorded = _recorded(items)
        if self._sampler_agrees is None:
            old = logprobs_of(list(chain(*packs_of)), forward, self.model)
            gap = max(float(np.abs(values - recorded[key]).max()) for key, values in old.items())
            self._sampler_agrees = gap <= TOLERANCE[dtype]
            if not self._sampler_agrees:
                return old
        return recorded

    def _after_step(self, meter: UpdateMeter) -> None:
        """What changes from step to step beside the weights."""
        self.steps += 1
        adaptive, kl = self.settings.kl_adaptive, meter.values.get("loss/kl")
        if kl is not None:
            meter.values["train/kl_coef"] = self.kl_coef
            if adaptive is not None:
                self.kl_coef = adaptive.next(self.kl_coef, kl)
        every = self.settings.reference_sync
        if every and self.steps % every == 0 and self.reference is not None:
            with torch.no_grad():
                current = dict(self.model.named_parameters())
                for name, parameter in self.reference.named_parameters():
                    parameter.copy_(current[name])

    def logprobs(self, batch: Batch) -> Logprobs:
        """The current policy's logprobs of all trained tokens, by (episode, call)."""
        return self._measure(batch, self.model, as_sampled=True)

    def drift(self, trees: Sequence[CallTree]) -> dict[tuple[int, int], float]:
        """The sum of log π / π_ref over each call's tokens, by (episode, call): over all that are trained, or that only
        `failure_reward: mask` keeps from it, because such an episode is compared like any other."""
        whole = [replace(tree, calls=list(map(_unmasked, tree.calls))) for tree in trees]
        batch = [(tree, EpisodeCredit("", [CallCredit([(0.0, 1.0)])] * len(tree.calls))) for tree in whole]
        policy = self.logprobs(batch)
        if self.reference is not None:
            reference = self._measure(batch, self.reference)
        else:
            with self.model.disable_adapter():
                reference = self._measure(batch, self.model)
        return {key: float((values - reference[key]).sum()) for key, values in policy.items()}

    # ------------------------------------------------------------------------------------------------ its parts

    def _step(self, forward: RowForward, packs: list[Pack], known: _Known, meter: UpdateMeter) -> None:
        """One optimiser step: the packs' gradients add up."""
        old = known.old
        settings = replace(self.settings.loss, kl_coef=self.kl_coef)
        entropy = Entropy.GRADIENT if settings.entropy_coef else Entropy.VALUE
        log_ratio_T = sampler_log_ratio_T = drift_T = None
        if len(packs) > 1 and old is not None:
            if settings.sums_ratio:
                sums, numbers = self._over_trajectories(packs, lambda pack: self._log_ratio(forward, pack, old))
                log_ratio_T = sums / numbers.clamp(min=1)
            if settings.sums_sampler:
                gaps, numbers = self._over_trajectories(packs, lambda pack: self._sampler_log_ratio(pack, old))
                sampler_log_ratio_T = gaps
                drift_T = None if log_ratio_T is None else log_ratio_T + gaps / numbers.clamp(min=1)
        for pack in packs:
            edges = self._tensors(pack, known)
            edges.log_ratio_T, edges.sampler_log_ratio_T, edges.drift_T = log_ratio_T, sampler_log_ratio_T, drift_T
            with _training_mode(self._dropouts):  # π_old and the reference are without the adapters' dropout
                logprobs = forward(self.model, pack, entropy=entropy)
                if old is None:  # the first step of this batch: its own forward pass yields them
                    values = logprobs.logprob_E.detach().double().cpu().numpy()
                    self.before.update((key, values[where]) for key, where in pack.edges.by_call())
                result = policy_loss(logprobs.logprob_E, edges, settings, logprobs.entropy_E)
                (result.loss * self.optimizer.loss_scale).backward()  # type: ignore[no-untyped-call]
            meter.add(result.sums)
        lr = self.settings.optim.lr_at(self.steps)
        self.updates += 1  # first: should the update be cut short, its beginning counts
        done = self.optimizer.step(lr)
        self.applied += done.applied
        if not done.applied:
            log.warning(
                "update %d: the gradient is not finite; the weights stay unchanged. If it happens again, lower "
                "ajet.trainer_common.optim.lr (now %g)",
                *(self.updates, lr),
            )
        meter.step(done.grad_norm, done.applied, lr)

    def _over_trajectories(self, packs: list[Pack], values_of: Callable[[Pack], Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of a value over each trajectory's tokens in all packs, and their number."""
        count = 1 + max(int(pack.edges.trajectory.max()) for pack in packs)
        parts = []
        for pack in packs:
            trajectory = torch.from_numpy(pack.edges.trajectory).to(self._device)
            parts.append(trajectory_sums(values_of(pack), trajectory, count))
        sums, numbers = zip(*parts, strict=True)
        return torch.stack(sums).sum(0), torch.stack(numbers).sum(0)

    def _log_ratio(self, forward: RowForward, pack: Pack, old: Logprobs) -> Tensor:
        with torch.no_grad():
            return forward(self.model, pack).logprob_E - self._on_device(_at(pack, old))

    def _sampler_log_ratio(self, pack: Pack, old: Logprobs) -> Tensor:
        return self._on_device(_at(pack, old) - pack.edges.sampler_logprob)

    def _reference_logprobs(self, forward: RowForward, packs_of: list[list[Pack]]) -> Logprobs | None:
        if not self._wants_reference:
            return None
        packs = [replace(pack, experts=None) for packs in packs_of for pack in packs]  # it has routes of its own
        if self.reference is None:
            with self.model.disable_adapter():
                return logprobs_of(packs, forward, self.model)
        with forward.session(self.reference):
            return logprobs_of(packs, forward, self.reference)

    def _measure(self, batch: Batch, model: Any, *, as_sampled: bool = False) -> Logprobs:
        items = items_of(batch)
        if not items:
            return {}
        forward, layouts = self._executor(items)
        with forward.session(model), self._following() if as_sampled else nullcontext():
            return logprobs_of(self._plan(items, layouts, as_sampled=as_sampled), forward, model)

    def _plan(self, items: list[Item], layouts: Sequence[Layout], *, as_sampled: bool = True) -> list[Pack]:
        packs = plan(items, self._costs, self.budget, layouts)
        if self.settings.follows_sampler and as_sampled:
            follow_sampler(packs, items)
        return packs

    def _following(self) -> AbstractContextManager[None]:
        """Around passes of the policy, if it follows the sampler's routes."""
        return following(self.model) if self.settings.follows_sampler else nullcontext()

    def _executor(self, items: list[Item]) -> Chosen:
        """Chosen once."""
        if self._chosen is None:
            options = self.settings
            chunk, liger, compiled = options.logits_chunk, options.liger, options.compile
            with self._checkpointing():
                self._chosen = choose(self.model, items, self.budget, chunk, liger=liger, compiled=compiled)
        return self._chosen

    def _mini_batches(self, items: list[Item], norm: LossNorm) -> list[list[Item]]:
        """The items of each update, with their weights in it."""
        tokens: Counter[int] = Counter()
        for item in items:
            tokens[item.episode] += int(item.tree.calls[item.call].mask.sum()) * len(item.entries)
        episodes = sorted(tokens)
        drawn = mini_batches(
            [tokens[episode] for episode in episodes],
            self.settings.mini_batches,
            norm,
            (self.settings.seed, self.updates),
        )
        if len(drawn) == 1:
            return [items]
        part_of = {episodes[index]: number for number, part in enumerate(drawn) for index in part.episodes}
        parts: list[list[Item]] = [[] for _ in drawn]
        for item in items:
            number = part_of[item.episode]
            scaled = [(advantage, weight * drawn[number].scale) for advantage, weight in item.entries]
            parts[number].append(replace(item, entries=scaled))
        return parts

    def _tensors(self, pack: Pack, known: _Known) -> EdgeTensors:
        edges = pack.edges
        old, reference, teacher = known
        device = self._device
        return EdgeTensors(
            sampler_E=self._on_device(edges.sampler_logprob),
            trajectory_E=torch.from_numpy(edges.trajectory).to(device),
            entry_edge_M=torch.from_numpy(edges.entry_edge).to(device),
            advantage_M=self._on_device(edges.entry_advantage),
            weight_M=self._on_device(edges.entry_weight),
            old_E=None if old is None else self._on_device(_at(pack, old)),
            reference_E=None if reference is None else self._on_device(_at(pack, reference)),
            teacher_E=None if teacher is None else self._on_device(_at(pack, teacher)),
        )

    def _on_device(self, values: NDArray[np.float64]) -> Tensor:
        dtype = torch.float64 if next(self.model.parameters()).dtype is torch.float64 else torch.float32
        return torch.from_numpy(values).to(self._device, dtype)

    def _checkpointing(self) -> AbstractContextManager[None]:
        return checkpointing(self.model) if self.settings.gradient_checkpointing else nullcontext()


@contextmanager
def _training_mode(modules: Sequence[Any]) -> Iterator[None]:
    """Put these modules alone into training mode, not those inside them."""
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False


def _adapter_dropouts(model: Any) -> list[Any]:
    """The dropout modules of LoRA adapters that drop anything."""
    return [
        module
        for name, module in model.named_modules()
        if ".lora_dropout." in name and isinstance(module, torch.nn.Dropout) and module.p > 0
    ]


def _unmasked(call: Call) -> Call:
    return replace(call, mask=np.ones_like(call.mask)) if call.drop == "failure_reward" else call


def _recorded(items: Sequence[Item]) -> Logprobs:
    """What the sampler said of the trained tokens."""
    calls = {(item.episode, item.call): item.tree.calls[item.call] for item in items}
    return {key: call.logprobs[call.mask].astype(np.float64) for key, call in calls.items()}


def _at(pack: Pack, known: Logprobs) -> NDArray[np.float64]:
    """Logprobs in the order of the pack's edges."""
    return np.concatenate([known[key] for key, _ in pack.edges.by_call()])
