"""`MemoryPlan`: what a run will take of a GPU's memory, or of the machine's, and what to change if that is too much.

Everything comes from the configuration and from the model's config.json: no weights are loaded. `ajet validate --plan`
(`show_plan`), a run's first lines (`announce_plan`) and `make gpu-check` show the same plan.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ajet.backbone.plan import serving_engine
from ajet.backbone.training_settings import checkpointing, has_reference, is_address, logits_chunk, pack_tokens
from ajet.engine.model_source import ModelSource
from ajet.schema.errors import ConfigError, FeatureUnavailableError
from ajet.schema.install import require_training
from ajet.system.processes import main_memory

if TYPE_CHECKING:
    from ajet.config import BackboneName, Config

log = logging.getLogger("ajet.backbone.memory")

GIB = 1024**3
WIDTH = 80
PROGRAM_BYTES = int(0.8 * GIB)
"""Main memory of the interpreter with PyTorch and transformers imported."""
CUDA_BYTES = int(1.5 * GIB)
"""GPU memory of CUDA's context and its libraries' workspaces, and what the allocator can't use. Not yet measured on a
GPU."""
VERL_SHARE = 0.5
"""verl's own default of `gpu_memory_utilization`."""
VERL_LOGITS_BYTES = 10
"""verl keeps a micro-batch's logits whole: bfloat16, float32 and the gradient."""
SMALL_BYTES = 100 * 2**20
"""Weights below this are trained on any CPU: a run says nothing about them."""
REFERENCE = "the starting weights, for the KL divergence"
KL_TERM = "trainer_common.use_kl_loss"
PART = 4
"""How many times less tokens of a pass are proposed than there may be."""
CONVERSATIONS = 8
"""Conversations of full length for which a smaller KV cache that is proposed has room."""


class Device(NamedTuple):
    """Where the model is trained."""

    kind: Literal["cpu", "cuda"]
    capacity: int | None
    """Bytes. None: not known."""

    @classmethod
    def here(cls, backbone: BackboneName) -> Device:
        """This machine's first GPU, else its main memory. verl and Trinity may run on another machine's GPUs."""
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
        """Whether it fits; None if the GPU's memory isn't known."""
        return None if self.device.capacity is None else self.total <= self.device.capacity

    @property
    def fixed(self) -> int:
        return sum(part.size for part in self.parts if part.fixed)

    def lines(self, changes: list[PlanChange]) -> Iterator[str]:
        """The table, and the changes."""
        yield self.title if len(self.title) <= WIDTH else f"{self.title[: WIDTH - 1]}…"
        for part in (*self.parts, MemoryPart("together", self.total, "")):
            yield f"  {part.what:<14}{_amount(part.size)}  {part.detail}".rstrip()[:WIDTH]
        for note in self.notes:
            yield from wrap(note, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
        place, capacity = "each GPU" if self.device.kind == "cuda" else "the machine", self.device.capacity
        if capacity is None:
            yield f"  how much {place} has is not known here: --gpu 80 compares with 80 GiB"
        else:
            yield f"  it {'fits' if self.fits else 'does not fit'}: {place} has {capacity / GIB:.1f} GiB"
        if changes:
            yield "  with these changes, each together with those above it, it would take"
        for change in changes:
            yield f"    {change.keys:<54}{_amount(change.total)}"


def plan_memory(config: Config, backbone: BackboneName, device: Device) -> MemoryPlan | None:
    """The plan. None if the run trains nothing here, nothing is known of the model's shape, or a pass of it can't be
    computed without weights (`meta_model` tells the last two apart)."""
    if not _trains(config, backbone) or (model := meta_model(config, device)) is None:
        return None
    try:
        parts, notes = (_local if backbone == "local" else _sharded)(config, backbone, device, model)
    except RuntimeError as error:  # an operation that PyTorch doesn't have where tensors are only shapes
        log.info("no memory plan of %s: %s", config.ajet.model.path, str(error).partition("\n")[0])
        return None
    how = "LoRA" if config.ajet.model.lora.enabled else "all weights"
    title = f"memory: {_place(config.ajet.model.path)}, {how}, on {backbone}"
    return MemoryPlan(title, device, tuple(part for part in parts if part.size), tuple(notes))


def _trains(config: Config, backbone: BackboneName) -> bool:
    return backbone in ("local", "verl", "trinity") and not config.ajet.trainer_common.val_only


def _local(config: Config, backbone: BackboneName, device: Device, model: Any) -> tuple[list[MemoryPart], list[str]]:
    """One process holds everything."""
    ajet = config.ajet
    common, optim = ajet.trainer_common, ajet.trainer_common.optim
    tokens = longest_pack(config, device)
    one = _pass(config, device, tokens)
    bits = ajet.model.lora.base_bits if ajet.model.lora.enabled else None
    found = _training_bytes(model, one, optim.state_bits, bits, optim.master)
    offload = common.fsdp_config.optimizer_offload and device.kind == "cuda"
    count, trained = _parameters(model)
    kept = "one layer at a time" if one.checkpointing else "all layers"
    dtype = str(_dtype(model)).removeprefix("torch.")
    form = f"{_short(count)} parameters, {dtype}{', 4 bits at rest' if bits else ''}"
    parts = [
        MemoryPart("weights", found.weights, form, True),
        MemoryPart("reference", found.weights if has_reference(config) else 0, REFERENCE, True),
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
    if (teacher := common.algorithm.distillation.teacher) and not is_address(teacher):
        notes.append(f"not counted: the teacher, {teacher}")
    return parts, notes


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
    from ajet.backbone.ray.facts import micro_tokens

    common = config.ajet.trainer_common
    gpus = max(1, common.nnodes * common.n_gpus_per_node)
    if backbone == "trinity":
        gpus = max(1, gpus - config.ajet.rollout.n_vllm_engine * config.ajet.rollout.tensor_model_parallel_size)
    tokens = micro_tokens(config) // common.ulysses_sequence_parallel_size
    one = _pass(config, device, tokens)
    found = _training_bytes(model, one, 32, None, "float32")
    count, trained = _parameters(model)
    offload, weights = common.fsdp_config, 4 * count // gpus
    vocabulary = model.config.get_text_config().vocab_size
    parts = [
        MemoryPart("weights", weights, f"{_short(count)} parameters in float32, over {gpus} GPUs", True),
        MemoryPart("reference", weights if has_reference(config) and not offload.param_offload else 0, REFERENCE, True),
        MemoryPart("gradients", 4 * trained // gpus, "the same way", True),
        MemoryPart("optimiser", 0 if offload.optimizer_offload else 8 * trained // gpus, "AdamW, the same way", True),
        MemoryPart("layers", _gathered(model), "gathered for computing"),
        MemoryPart("activations", found.activations, f"of {tokens:,} tokens"),
        MemoryPart("logits", VERL_LOGITS_BYTES * tokens * vocabulary, "of all tokens at once"),
        MemoryPart("CUDA", CUDA_BYTES, "context and workspaces, roughly"),
    ]
    note = "has GPUs of its own; the table is about those that train"
    if backbone == "verl":
        note = f"takes {VERL_SHARE:g} of the GPU while it samples, unless the verl block says otherwise"
    return parts, [f"{serving_engine(config, backbone)} {note}"]


def _parameters(model: Any) -> tuple[int, int]:
    """How many there are, and how many of them are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _gathered(model: Any) -> int:
    """Two layers, and the embeddings or the output layer, as a GPU has them whole for a moment."""
    layers, rest = Counter[str](), 0
    for name, parameter in model.named_parameters():
        if layer := re.match(r".*?\.layers\.\w+", name):
            layers[layer[0]] += parameter.numel()
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


def meta_model(config: Config, device: Device) -> Any:
    """The model without weights. None: nothing is known of its shape."""
    model = config.ajet.model
    return _meta_model(model.path, model.dtype, device.kind, model.lora.model_dump_json() if model.lora.enabled else "")


@cache
def _meta_model(path: str, dtype: str, device: str, lora: str) -> Any:
    from ajet.backbone.local.learner import with_adapters
    from ajet.config.root import LoraConfig

    model = ModelSource.resolve(path).on_meta(dtype, device)
    if model is None or not lora:
        return model
    return with_adapters(model, LoraConfig.model_validate_json(lora))


@cache
def _training_bytes(model: Any, one: Any, state_bits: int, base_bits: int | None, master: str) -> Any:
    from ajet.trainer.footprint import training_bytes

    return training_bytes(model, one, state_bits=state_bits, base_bits=base_bits, master=master)


def _amount(size: int) -> str:
    return f"{size / GIB:>8.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:>8.1f} MiB"


def _place(path: str) -> str:
    """A folder as the user may type it."""
    folder = Path(path)
    return str(folder.relative_to(Path.cwd())) if folder.is_absolute() and folder.is_relative_to(Path.cwd()) else path


def _short(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def show_plan(config: Config, backbone: BackboneName, gpu: float | None) -> list[str]:
    """Print the plan for this machine, or for a GPU of so many GiB. Returns what is wrong."""
    require_training("a memory plan")
    print(flush=True)
    device = Device.here(backbone) if gpu is None else Device("cuda", int(gpu * GIB))
    if (plan := plan_memory(config, backbone, device)) is None:
        print(_no_plan(config, backbone, device))
        return []
    changes = changes_that_help(config, backbone, device, plan)
    print("\n".join(plan.lines(changes)))
    if plan.fits is not False:
        return []
    found = ", ".join(change.keys for change in changes) or "a smaller model, or more GPUs (--backbone=verl)"
    there = f"{plan.total / GIB:.1f} GiB and there are {(device.capacity or 0) / GIB:.1f}"
    return [f"{config.ajet.model.path} needs {there}; less is needed with {found}"]


def announce_plan(config: Config) -> None:
    """The first lines of a run on `local`. Raises a `ConfigError` if the model can't fit, whatever the batch."""
    device = Device.here("local")
    if device.kind == "cpu" and _is_small(config.ajet.model.path):
        return
    if (plan := plan_memory(config, "local", device)) is None:
        log.info("%s", _no_plan(config, "local", device))
        return
    changes = changes_that_help(config, "local", device, plan)
    refuse_if_hopeless(plan, changes)
    log.log(logging.WARNING if plan.fits is False else logging.INFO, "%s", "\n    ".join(plan.lines(changes)))


def _is_small(model: str) -> bool:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model.startswith("tiny:")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= SMALL_BYTES


def _no_plan(config: Config, backbone: BackboneName, device: Device) -> str:
    path = config.ajet.model.path
    if not _trains(config, backbone):
        why = f"{backbone} trains no weights here"
    elif meta_model(config, device) is not None:
        why = f"a pass of {path} can't be computed without its weights"
    else:
        why = f"no config.json of {path} is at hand: put its folder into ajet.model.path, or load it once"
    return f"memory: not planned, because {why}"


def changes_that_help(config: Config, backbone: BackboneName, device: Device, plan: MemoryPlan) -> list[PlanChange]:
    """What to change until it fits, the cheapest first, each together with those before it; nothing if it fits."""
    if plan.fits is not False:
        return []
    present = config.model_copy(deep=True)
    found, best = list[PlanChange](), plan.total
    for key, value in _remedies(config, backbone, device):
        trial = present.model_copy(deep=True)
        group, _, name = f"ajet.{key}".rpartition(".")
        setattr(attrgetter(group)(trial), name, value)
        now = plan_memory(trial, backbone, device)
        if now is None or now.total >= best:
            continue
        present, best = trial, now.total
        found.append(PlanChange(f"{key}: {str(value).lower()}", best))
        if now.fits:
            break
    if present.ajet.model.lora.enabled:  # whose reference is the base model: the KL term takes nothing
        found = [change for change in found if not change.keys.startswith(KL_TERM)]
    return found


def refuse_if_hopeless(plan: MemoryPlan, changes: list[PlanChange]) -> None:
    """Raise if the run can't fit, whatever its batches."""
    capacity = plan.device.capacity
    if capacity is None or plan.fixed <= capacity:
        return
    place = "the GPU" if plan.device.kind == "cuda" else "this machine"
    advice = "choose a smaller model, or more GPUs with --backbone=verl"
    if changes and changes[-1].total <= capacity:
        advice = f"set {', '.join(change.keys for change in changes)}"
    raise ConfigError(
        f"ajet.model.path: {plan.title.removeprefix('memory: ')}, does not fit: weights, gradients and optimiser alone "
        f"take {_amount(plan.fixed).strip()}, and {place} has {_amount(capacity).strip()}: {advice}"
    )


def _remedies(config: Config, backbone: BackboneName, device: Device) -> Iterator[tuple[str, Any]]:
    ajet, rollout = config.ajet, config.ajet.rollout
    local = backbone == "local"
    if logits_chunk(config) == 0:
        yield "trainer_common.logits_chunk", "auto"
    if local and rollout.engine == "torch":
        one = conversation_bytes(meta_model(config, device), rollout.max_model_len)
        yield "rollout.kv_cache_gb", max(1, round(CONVERSATIONS * one / 1e9))
    if local and rollout.engine == "vllm":
        yield "rollout.vllm.sleep", True
    if backbone != "trinity":
        yield "trainer_common.gradient_checkpointing", True
    tokens = longest_pack(config, device) if local else 16384
    less = max(tokens // PART, rollout.max_model_len)
    yield f"trainer_common.{'max_tokens_per_step' if local else 'micro_tokens'}", less
    if device.kind == "cuda" and local:
        yield "trainer_common.optim.state_bits", 8
        yield "trainer_common.optim.master", "none"
    elif device.kind == "cuda":
        yield "trainer_common.fsdp_config.optimizer_offload", True
    if not ajet.model.lora.enabled:
        yield KL_TERM, False
        yield "model.lora.enabled", True
    if local and rollout.engine == "torch":
        yield "model.lora.base_bits", 4
    if device.kind == "cpu":
        yield "model.dtype", "bfloat16"
