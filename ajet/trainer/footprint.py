"""Measures the memory that training allocates, by running it on PyTorch's `meta` device, where tensors have shapes but
no memory. Nothing is loaded, and it works for every model that the trainer can train.

`training_bytes` gives the parts. The largest, one pass over a pack, comes from `pass_bytes`, which runs the trainer's
own forward and backward pass, with a stand-in for attention that makes and keeps what the real one would, and counts
the bytes that are alive at once. If the layers repeat, passes with a few and with some more of them give the need of
all; if layers go along the tokens with a state, short passes give the need of long ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers.integrations import moe

from ajet.engine.attention_rules import (
    ALL,
    REFUSALS,
    Visibility,
    attending,
    describe_refusal,
    layer_shapes,
    one_sequence,
)
from ajet.engine.layers import causal_model, first_layers, layer_kinds, layers_of, period_of
from ajet.engine.quantization import bytes_in_4_bits, linear_layers
from ajet.schema.errors import FeatureUnavailableError
from ajet.trainer.executor import carried_state, checkpointing, rows_for, tree_support
from ajet.trainer.forward import Entropy, Wanted, chunk_of, run_edges
from ajet.trainer.optimizer import GROUP_BYTES
from ajet.trainer.pack import Layout

SMALL_8BIT, BLOCK_8BIT = 4096, 256
"""bitsandbytes: weights with fewer numbers keep 32 bits; numbers that share a factor."""

FEW = 2
"""The layers of a measured pass if all are alike, and another pass has one more."""
ASKED = 8
"""The tokens of a pass that only tells whether there can be one."""
SCANNED = (256, 512)
"""The tokens of measured passes through layers that go along the tokens with a state. Multiples of every chunk size."""
SCANNED_SINGLY = (32, 64)
"""The same where transformers goes token by token, as in Mamba 1."""
MAMBA_1 = ("mamba_dt_rank", "time_step_rank")
"""Keys of configurations whose models have such layers."""

NAME = {"cpu": "ajet_footprint_cpu", "cuda": "ajet_footprint_cuda"}
"""The stand-ins' names in transformers' registry, by the device that they stand for."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass."""

    tokens: int
    trained: int
    """The number of tokens whose log-probability is computed."""
    device: str = "cpu"
    """The device that the pass would run on: `cpu` or `cuda`."""
    checkpointing: bool = False
    logits_chunk: int | None = None
    warm: bool = False
    """Whether logits are divided by a temperature other than 1."""
    entropy: bool = False
    """Whether the entropy is part of the loss."""


class TrainedAs(NamedTuple):
    """How a model's packs are computed."""

    layout: Layout
    why_rows: str | None
    """What is in the way of trees."""


def trained_as(model: Any) -> TrainedAs:
    """Ask a model on the `meta` device. Shapes can't say whether values are right: a run compares those on its first
    batch. Raises a `FeatureUnavailableError` if the model can't be trained."""
    why_rows = tree_support(model)
    try:
        pass_bytes(model, Pass(ASKED, ASKED))
    except REFUSALS as error:
        why = describe_refusal(model, error)
        raise FeatureUnavailableError(f"the local trainer can't train {type(model).__name__}: {why}") from error
    except RuntimeError:  # an operation that needs values
        if why_rows is None:
            raise
    if why_rows is None:
        try:
            layer_shapes(model)
        except REFUSALS as error:
            why_rows = describe_refusal(model, error)
    return TrainedAs(Layout.TREE if why_rows is None else rows_for(model), why_rows)


class TrainingBytes(NamedTuple):
    """The memory of training, by purpose. It counts tensors only, not the allocator's overhead."""

    weights: int
    gradients: int
    copies: int
    """Float32 copies of trained half-precision weights."""
    moments: int
    """The two of AdamW."""
    activations: int
    """The peak of the longest pass, or of the update if that is more."""
    logits: int
    """The part that logits add."""

    @property
    def total(self) -> int:
        return sum(self)


def training_bytes(
    model: Any, one: Pass, *, state_bits: int = 32, base_bits: int | None = None, master: str = "float32"
) -> TrainingBytes:
    """The memory of an update of this model (on the `meta` device) whose longest pass is `one`. With `base_bits`, its
    frozen linear layers are stored in 4 bits, and one at a time is dequantized; with the `master` none, one group of
    bfloat16 weights at a time has a copy."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(_size(parameter) for parameter in trained)
    copied = [4 * parameter.numel() for parameter in trained if parameter.dtype.itemsize < 4]
    body = pass_bytes(model, replace(one, trained=1)) - gradients
    logits = max(0, pass_bytes(model, one) - gradients - body)
    # a group's gradients in float32, whose half-precision ones are released meanwhile; and AdamW's own two denominators
    of_update = max(min(GROUP_BYTES, sum(copied)), *copied, 0) // 2
    of_update += 2 * max(4 * parameter.numel() for parameter in trained)
    if master == "none":
        passing = [4 * parameter.numel() for parameter in trained if parameter.dtype is torch.bfloat16]
        of_update += max(min(GROUP_BYTES, sum(passing)), *passing, 0)
        copied = [4 * parameter.numel() for parameter in trained if parameter.dtype is torch.float16]
    weights = sum(_size(parameter) for parameter in model.parameters())
    if base_bits is not None:
        frozen = [layer.weight for _, layer in linear_layers(model) if not layer.weight.requires_grad]
        weights -= sum(_size(weight) - bytes_in_4_bits(weight.numel()) for weight in frozen)
        body += max(map(_size, frozen), default=0)
    return TrainingBytes(
        weights=weights,
        gradients=gradients,
        copies=sum(copied),
        moments=sum(_moments(parameter.numel(), state_bits) for parameter in trained),
        activations=max(body, of_update - logits),
        logits=logits,
    )


def _moments(numbers: int, bits: int) -> int:
    """Bytes of a weight's two moments. bitsandbytes leaves small weights alone, and adds a factor per block."""
    return 8 * numbers if bits == 32 or numbers < SMALL_8BIT else 2 * numbers + 8 * numbers // BLOCK_8BIT


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def pass_bytes(model: Any, one: Pass) -> int:
    """The most that is allocated at once beyond the weights, the gradients of an earlier pass included.

    `model` lies on the `meta` device; its gradients and modes are left as they were.
    """
    singly = any(hasattr(causal_model(model).config.get_text_config(), key) for key in MAMBA_1)
    few, many = SCANNED_SINGLY if singly else SCANNED
    if not _is_stateful(model) or one.tokens <= many or layers_of(model) is None:
        return max(_all_layers(model, one).values())
    near, far = (_short(model, replace(one, tokens=tokens, trained=1)) for tokens in (few, many))
    steps = (one.tokens - few) / (many - few)
    peaks = {stage: peak + int((far[stage] - peak) * steps) for stage, peak in near.items()}
    entry = model.get_input_embeddings()  # without layers, no adapter is left that wants a gradient
    with first_layers(model, 0), entry.register_forward_hook(lambda _entry, _given, states: states.requires_grad_()):
        one_of_them, all_of_them = (
            max(_peaks(model, replace(one, trained=some)).values()) for some in (1, one.trained)
        )
    peaks["after"] += all_of_them - one_of_them
    return max(peaks.values())


@lru_cache(maxsize=2)
def _short(model: Any, one: Pass) -> dict[str, int]:
    """The two passes that tell of long ones, with and without their logits."""
    return _all_layers(model, one)


def _is_stateful(model: Any) -> bool:
    """Whether layers go along the tokens with a state."""
    return bool(getattr(causal_model(model), "_is_stateful", False))


def _all_layers(model: Any, one: Pass) -> dict[str, int]:
    """The peaks with all layers: in each stage of a pass, every further period of them adds the same amount."""
    few = few_layers(model)
    if few is None:
        return _peaks(model, one)
    found = []
    for count in (few.fewer, few.more):
        with first_layers(model, count):
            found.append(_peaks(model, one))
    (fewer, more), steps = found, (few.layers - few.fewer) // (few.more - few.fewer)
    return {stage: peak + (more[stage] - peak) * steps for stage, peak in fewer.items()}


class FewLayers(NamedTuple):
    """Two beginnings of a model's layers that tell what all of them need."""

    fewer: int
    more: int
    """By one period."""
    layers: int
    """All, a whole number of periods more."""


def few_layers(model: Any) -> FewLayers | None:
    """How few layers stand for all, where further ones only repeat them. None: all have to be computed."""
    layers = layers_of(model)
    if layers is None:
        return None
    shared = len({id(each) for each in layers.parameters()}) < sum(len(list(each.parameters())) for each in layers)
    period = period_of(layer_kinds(layers))
    # where kinds differ, each of them is also between the first and the last layer
    fewer = FEW if period == 1 else 2 * period + len(layers) % period
    if shared or len(layers) <= fewer + period:
        return None
    return FewLayers(fewer, fewer + period, len(layers))


def _peaks(model: Any, one: Pass) -> dict[str, int]:
    """The peak of live bytes, by stage of the pass."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    thrifty = checkpointing(model) if one.checkpointing else nullcontext()
    try:
        with thrifty, LiveBytes([*model.parameters(), *model.buffers()]) as counter, _stand_in(model, one.device):
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            with _stages(layers_of(model) or (), counter):
                loss = _forward(model, one)
            loss.backward()  # type: ignore[no-untyped-call]
        peaks: dict[str, int] = counter.peaks
        return peaks
    finally:
        for parameter in trained:
            parameter.grad = None


@contextmanager
def _stages(layers: Any, counter: LiveBytes) -> Iterator[None]:
    """Tells the counter where the pass is: before the layers, in the first, the last or one between, after them, and
    the same ways back. The loss's backward pass may be outside."""
    last = len(layers) - 1

    def entered(index: int) -> None:
        counter.enter("first" if index == 0 else "last" if index == last else "between")

    def left(index: int, output: Any) -> None:
        if index == last:
            counter.enter("after")
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad:
            way = "first" if index == 0 else "last" if index == last else "between"
            states.register_hook(lambda _gradient: counter.enter(f"{way}, backward"))

    hooks = []
    for index, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda _layer, _given, index=index: entered(index)))
        hooks.append(layer.register_forward_hook(lambda _layer, _given, output, index=index: left(index, output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _forward(model: Any, one: Pass) -> Tensor:
    ids = torch.zeros(1, one.tokens, dtype=torch.long, device="meta")
    arguments = {"input_ids": ids, "use_cache": False}
    if carried_state(model) is None:  # without values, layers with a state can't look at either
        arguments |= {"position_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    temperature = np.full(one.trained, 0.5 if one.warm else 1.0)
    wanted = Wanted(np.arange(one.trained), np.zeros(one.trained, np.int64), temperature)
    chunk = chunk_of(model, one.trained, one.logits_chunk)
    found = run_edges(model, arguments, wanted, Entropy.GRADIENT if one.entropy else Entropy.VALUE, chunk)
    loss = found.logprob_E.sum()
    return loss if found.entropy_E is None or not one.entropy else loss + found.entropy_E.sum()


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operations make inside it, while they exist. Views count once."""

    def __init__(self, there_before: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peaks = {"before": 0}
        """The peak so far, by stage."""
        self._stage = "before"
        self._known: Any = WeakIdKeyDictionary()
        for tensor in there_before:
            self._known[tensor.untyped_storage()] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def enter(self, stage: str) -> None:
        """From now on, live bytes count for this stage."""
        self._stage = stage
        self.peaks[stage] = max(self.peaks.get(stage, 0), self.now)

    def _see(self, tensor: Tensor) -> None:
        storage: Any = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.now += size
        self.peaks[self._stage] = max(self.peaks[self._stage], self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


# ---------------------------------------------------------------- attention that computes nothing


@contextmanager
def _stand_in(model: Any, device: str) -> Iterator[None]:
    _register()
    causal: Any = causal_model(model)
    with attending(causal, NAME[device]), one_sequence(), _experts_of_any_format():
        yield


@contextmanager
def _experts_of_any_format() -> Iterator[None]:
    """PyTorch's product of grouped experts takes nothing but bfloat16 on `meta`; the one that transformers has for
    other cases makes the same tensors."""
    experts: Any = moe
    chosen = experts._can_use_grouped_mm
    experts._can_use_grouped_mm = lambda _input, weight, _offsets: weight.dtype is torch.bfloat16
    try:
        yield
    finally:
        experts._can_use_grouped_mm = chosen


@cache
def _register() -> None:
    for device, name in NAME.items():
        transformers.AttentionInterface.register(name, partial(_attend_nothing, gathers=device == "cpu"))
        transformers.AttentionMaskInterface.register(name, _no_mask)


def _no_mask(**_options: Any) -> Visibility:
    return ALL  # a window hides tokens, but the trainer's kernels keep the same tensors


def _attend_nothing(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, gathers: bool, **_options: Any
) -> tuple[Tensor, None]:
    """As `BlockAttention` (`gathers`), which repeats keys and values for the heads that share them, or as
    FlexAttention, which doesn't."""
    groups = query.shape[1] // key.shape[1]
    if gathers and groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    tokens_first = (each[0].transpose(0, 1) for each in (query, key, value))
    output: Tensor = _Nothing.apply(*tokens_first, gathers)  # type: ignore[no-untyped-call]
    return output[None], None


class _Nothing(torch.autograd.Function):
    """Keeps and returns tensors of the same shapes as attention. [tokens, heads, size]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, gathers: bool) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = value.new_empty(*query.shape[:2], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:2], dtype=torch.float32))
        ctx.gathers = gathers
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        query, key, value, output, _ = ctx.saved_tensors
        found = [torch.empty_like(each) for each in (query, key, value)]
        if ctx.gathers:  # the rows of a batch, and their gradients
            rows = [torch.empty_like(each) for each in (grad, query, key, value, output, *found)]
            del rows
        return *found, None
