"""`MemoryPlan`: what a run will take of a GPU's memory, or of the machine's, and what to change if that is too much.

Everything comes from the configuration and from the model's config.json: no weights are loaded. `ajet validate --plan`,
a run's first lines and `make gpu-check` show the same plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ajet.backbone.plan import serving_engine
from ajet.backbone.training_settings import checkpointing, logits_chunk, loss_settings, pack_tokens
from ajet.engine.model_source import ModelSource
from ajet.schema.errors import FeatureUnavailableError
from ajet.system.processes import main_memory

if TYPE_CHECKING:
    from ajet.config import BackboneName, Config

log = logging.getLogger("ajet.backbone.memory_plan")

GIB = 1024**3
WIDTH = 80
"""Columns of the table."""
PROGRAM_BYTES = int(0.8 * GIB)
"""Main memory of the interpreter with PyTorch and transformers imported."""
CUDA_BYTES = int(1.5 * GIB)
"""GPU memory of CUDA's context and its libraries' workspaces, and what the allocator can't use. Not yet measured on a
GPU."""
VERL_SHARE = 0.5
"""verl's own default of `gpu_memory_utilization`."""
VERL_LOGITS_BYTES = 10
"""verl keeps a micro-batch's logits whole: bfloat16, float32 and the gradient."""


class Device(NamedTuple):
    """Where the model is trained."""

    kind: Literal["cpu", "cuda"]
    capacity: int | None
    """Bytes. None: not known."""

    @classmethod
    def here(cls, backbone: BackboneName) -> Device:
        """This machine's: its first GPU, else its main memory. verl and Trinity may run on another machine's GPUs."""
        import torch

        if torch.cuda.is_available():
            return cls("cuda", torch.cuda.get_device_properties(0).total_memory)
        return cls("cuda", None) if backbone in ("verl", "trinity") else cls("cpu", main_memory().total)


class MemoryPart(NamedTuple):
    """One line of the table."""

    what: str
    size: int
    detail: str
    fixed: bool = False
    """Whether it is there all the time and known exactly, whatever the batch."""


class PlanChange(NamedTuple):
    """Something to change, and what the run would take with it and all the changes before it."""

    keys: str
    total: int

    @property
    def key(self) -> str:
        return self.keys.partition(":")[0]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run takes on each GPU, or of the machine's memory."""

    title: str
    device: Device
    parts: tuple[MemoryPart, ...]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """None if the GPU's memory is not known."""
        return None if self.device.capacity is None else self.total <= self.device.capacity

    @property
    def hopeless(self) -> bool:
        """Whether what is known exactly is already too much."""
        capacity = self.device.capacity
        return capacity is not None and sum(part.size for part in self.parts if part.fixed) > capacity

    def lines(self, changes: list[PlanChange] | None = None) -> Iterator[str]:
        """The table, and the changes."""
        yield self.title if len(self.title) <= WIDTH else f"{self.title[: WIDTH - 1]}…"
        for part in self.parts:
            yield _row(part.what, part.size, part.detail)
        place = "each GPU" if self.device.kind == "cuda" else "the machine"
        yield _row("together", self.total, "")
        for note in self.notes:
            yield from _wrapped(note)
        capacity = self.device.capacity
        if capacity is None:
            yield f"  how much {place} has is not known here: --gpu 80 compares with 80 GiB"
        elif self.fits:
            yield f"  it fits: {place} has {capacity / GIB:.1f} GiB"
        else:
            yield f"  it does not fit: {place} has {capacity / GIB:.1f} GiB"
        if changes:
            yield "  with these changes, each together with those above it, it would take"
        for change in changes or ():
            yield _row(f"  {change.keys}", change.total, "", wide=True)


def plan_memory(config: Config, backbone: BackboneName, device: Device) -> MemoryPlan | None:
    """The plan. None if the run trains nothing here, nothing is known of the model's shape, or a pass of it can't be
    computed without weights (`meta_model` tells the last two apart)."""
    if backbone not in ("local", "verl", "trinity") or config.ajet.trainer_common.val_only:
        return None
    model = meta_model(config, device)
    if model is None:
        return None
    try:
        parts, notes = (_local if backbone == "local" else _sharded)(config, backbone, device, model)
    except RuntimeError as error:  # an operation that PyTorch doesn't have where tensors are only shapes
        log.info("no memory plan of %s: %s", config.ajet.model.path, str(error).partition("\n")[0])
        return None
    ajet = config.ajet
    how = "LoRA" if ajet.model.lora.enabled else "all weights"
    title = f"memory: {_place(ajet.model.path)}, {how}, on {backbone}"
    return MemoryPlan(title, device, tuple(part for part in parts if part.size), tuple(notes))


# ---------------------------------------------------------------- the parts


def _local(config: Config, backbone: BackboneName, device: Device, model: Any) -> tuple[list[MemoryPart], list[str]]:
    """One process holds everything."""
    ajet = config.ajet
    common = ajet.trainer_common
    tokens = longest_pack(config, device)
    one = _pass(config, device, tokens)
    bits = ajet.model.lora.base_bits if ajet.model.lora.enabled else None
    optim = common.optim
    found = _training_bytes(_Meta.key(config, device), one, optim.state_bits, bits, optim.master)
    offload = common.fsdp_config.optimizer_offload and device.kind == "cuda"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    count = sum(p.numel() for p in model.parameters())
    dtype = str(_dtype(model)).removeprefix("torch.")
    kept = "one layer at a time" if one.checkpointing else "all layers"
    parts = [
        MemoryPart(
            "weights", found.weights, f"{_short(count)} parameters, {dtype}{', 4 bits at rest' if bits else ''}", True
        ),
        *_reference(config, found.weights),
        MemoryPart("gradients", found.gradients, f"{_short(trained)} trained parameters", True),
        MemoryPart("optimiser", 0 if offload else found.moments, f"AdamW, {optim.state_bits} bits", True),
        MemoryPart("float32 copy", 0 if offload else found.copies, "of the trained weights", True),
        MemoryPart("activations", found.activations, f"of {tokens:,} tokens, {kept}"),
        MemoryPart("logits", found.logits, "in chunks" if one.logits_chunk != 0 else "of all tokens at once"),
        *_engine(config, device, model, found.weights),
        MemoryPart("program", PROGRAM_BYTES if device.kind == "cpu" else 0, "the interpreter and its libraries"),
        MemoryPart("CUDA", CUDA_BYTES if device.kind == "cuda" else 0, "context and workspaces, roughly"),
    ]
    notes = []
    if offload:
        notes.append(f"in main memory: {(found.moments + found.copies) / GIB:.1f} GiB of the optimiser's")
    if (teacher := common.algorithm.distillation.teacher) and not teacher.startswith(("http://", "https://")):
        notes.append(f"not counted: the teacher, {teacher}")
    return parts, notes


def _reference(config: Config, weights: int) -> Iterator[MemoryPart]:
    in_reward = config.ajet.trainer_common.algorithm.use_kl_in_reward
    if not config.ajet.model.lora.enabled and (loss_settings(config).kl_coef or in_reward):
        yield MemoryPart("reference", weights, "the starting weights, for the KL divergence", True)


def _engine(config: Config, device: Device, model: Any, weights: int) -> Iterator[MemoryPart]:
    """What serves the replies takes beside the trainer."""
    rollout = config.ajet.rollout
    if rollout.engine == "vllm":
        if not rollout.vllm.devices and device.capacity is not None:
            share = rollout.vllm.gpu_memory_utilization
            detail = "asleep during updates" if rollout.vllm.sleep else f"gpu_memory_utilization {share:g}"
            yield MemoryPart("vLLM", 0 if rollout.vllm.sleep else int(share * device.capacity), detail)
        return
    shape = _served_shape(model)
    if rollout.engine != "torch" or shape is None:
        return
    from ajet.engine.torch import CPU_SHARE, FULL_LENGTH_CACHE, GPU_SHARE

    most = FULL_LENGTH_CACHE * rollout.max_num_seqs * conversation_bytes(model, rollout.max_model_len)
    if rollout.kv_cache_gb is not None:
        most = int(rollout.kv_cache_gb * 1e9)
    elif device.capacity is not None:
        share = GPU_SHARE if device.kind == "cuda" else CPU_SHARE
        most = min(most, int(share * max(0, device.capacity - weights)))
    each = f", {shape.kept_bytes / 2**20:,.1f} MiB a sequence" if shape.kept_bytes else ""
    yield MemoryPart("KV cache", most, f"{shape.bytes_per_token(_dtype(model)) / 1024:,.0f} KiB a token{each}")
    yield MemoryPart("states", rollout.max_num_seqs * shape.state_bytes, "of all sequences, made anew in each step")


def _sharded(config: Config, backbone: BackboneName, device: Device, model: Any) -> tuple[list[MemoryPart], list[str]]:
    """verl and Trinity: FSDP over all GPUs, float32 weights, computation in the model's number format."""
    from ajet.backbone.ray.mapping import micro_tokens

    common = config.ajet.trainer_common
    gpus = max(1, common.nnodes * common.n_gpus_per_node)
    if backbone == "trinity":
        gpus = max(1, gpus - config.ajet.rollout.n_vllm_engine * config.ajet.rollout.tensor_model_parallel_size)
    tokens = micro_tokens(config) // common.ulysses_sequence_parallel_size
    one = _pass(config, device, tokens)
    found = _training_bytes(_Meta.key(config, device), one, 32, None, "float32")
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    offload = common.fsdp_config
    vocabulary = model.config.get_text_config().vocab_size
    parts = [
        MemoryPart("weights", 4 * count // gpus, f"{_short(count)} parameters in float32, over {gpus} GPUs", True),
        *(
            part._replace(size=0 if offload.param_offload else 4 * count // gpus)
            for part in _reference(config, found.weights)
        ),
        MemoryPart("gradients", 4 * trained // gpus, "the same way", True),
        MemoryPart("optimiser", 0 if offload.optimizer_offload else 8 * trained // gpus, "AdamW, the same way", True),
        MemoryPart("layers", _gathered(model), "gathered for computing"),
        MemoryPart("activations", found.activations, f"of {tokens:,} tokens"),
        MemoryPart("logits", VERL_LOGITS_BYTES * tokens * vocabulary, "of all tokens at once"),
        MemoryPart("CUDA", CUDA_BYTES, "context and workspaces, roughly"),
    ]
    engine = serving_engine(config, backbone)
    if backbone == "trinity":
        notes = [f"{engine} has GPUs of its own; the table is about those that train"]
    else:
        share = f"{VERL_SHARE:g} of the GPU, unless the verl block says otherwise"
        notes = [f"while replies are sampled, {engine} takes {share}; it sleeps during updates"]
    return parts, notes


def _gathered(model: Any) -> int:
    """Two layers, and the embeddings or the output layer, as a GPU has them whole for a moment."""
    layers: dict[str, int] = {}
    rest = 0
    for name, parameter in model.named_parameters():
        before, found, after = name.partition(".layers.")
        if found:
            layer = f"{before}.{after.partition('.')[0]}"
            layers[layer] = layers.get(layer, 0) + parameter.numel()
        else:
            rest = max(rest, parameter.numel())
    return int(_dtype(model).itemsize) * (2 * max(layers.values(), default=0) + rest)


def longest_pack(config: Config, device: Device) -> int:
    """Most tokens of a pass on `local`."""
    from ajet.trainer.trainer import AUTO_TOKENS_CPU, AUTO_TOKENS_GPU

    ajet = config.ajet
    budget = pack_tokens(config) or (AUTO_TOKENS_CPU if device.kind == "cpu" else AUTO_TOKENS_GPU)
    longest = ajet.rollout.max_model_len
    batch = ajet.data.train_batch_size * ajet.rollout.num_repeat * longest
    return max(min(budget, batch), longest)


def conversation_bytes(model: Any, length: int) -> int:
    """Keys, values and states of one conversation of so many tokens in the embedded engine."""
    shape = _served_shape(model)
    return 0 if shape is None else int(shape.conversation_bytes(length, _dtype(model)))


def _dtype(model: Any) -> Any:
    return next(model.parameters()).dtype


@cache
def _served_shape(model: Any) -> Any:
    """What the embedded engine stores of the model. None if it can't serve it, which a run says elsewhere."""
    from ajet.engine.torch import ServedShape

    try:
        return ServedShape.of(model.get_base_model() if hasattr(model, "get_base_model") else model).kv
    except (FeatureUnavailableError, RuntimeError) as error:  # or an operation that needs values
        log.info("the KV cache is not planned: %s", error)
        return None


def _pass(config: Config, device: Device, tokens: int) -> Any:
    from ajet.trainer.footprint import Pass

    return Pass(
        tokens=tokens,
        trained=tokens,
        device=device.kind,
        checkpointing=checkpointing(config, on_gpu=device.kind == "cuda"),
        logits_chunk=logits_chunk(config),
        warm=config.ajet.rollout.temperature != 1,
        entropy=config.ajet.trainer_common.algorithm.entropy_coef != 0,
    )


class _Meta(NamedTuple):
    """What decides a model without weights."""

    path: str
    dtype: str
    device: str
    lora: str

    @classmethod
    def key(cls, config: Config, device: Device) -> _Meta:
        model = config.ajet.model
        return cls(model.path, model.dtype, device.kind, model.lora.model_dump_json() if model.lora.enabled else "")


def meta_model(config: Config, device: Device) -> Any:
    """The model without weights. None: nothing is known of its shape."""
    return _model_of(_Meta.key(config, device))


@cache
def _model_of(key: _Meta) -> Any:
    from ajet.backbone.local.learner import with_adapters
    from ajet.config.root import LoraConfig

    model = ModelSource.resolve(key.path).on_meta(key.dtype, key.device)
    if model is None or not key.lora:
        return model
    return with_adapters(model, LoraConfig.model_validate_json(key.lora))


@cache
def _training_bytes(key: _Meta, one: Any, state_bits: int, base_bits: int | None, master: str) -> Any:
    from ajet.trainer.footprint import training_bytes

    return training_bytes(_model_of(key), one, state_bits=state_bits, base_bits=base_bits, master=master)


# ---------------------------------------------------------------- as text


def _row(what: str, size: int, detail: str, *, wide: bool = False) -> str:
    name = 56 if wide else 14
    return f"  {what:<{name}}{amount(size)}  {detail}".rstrip()[:WIDTH]


def amount(size: int) -> str:
    return f"{size / GIB:>8.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:>8.1f} MiB"


def _wrapped(text: str) -> Iterator[str]:
    from textwrap import wrap

    yield from wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")


def _place(path: str) -> str:
    """A folder as the user may type it."""
    folder = Path(path)
    return str(folder.relative_to(Path.cwd())) if folder.is_absolute() and folder.is_relative_to(Path.cwd()) else path


def _short(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
