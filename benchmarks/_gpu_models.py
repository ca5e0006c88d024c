"""The models with random weights that `gpu_check.py` measures, and the machine on which it does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ajet.backbone.memory import GIB
from ajet.config.root import LoraConfig
from ajet.engine.model_source import ModelSource, known_shapes
from ajet.trainer.checkpoint import write_model

TOKENIZER = "tiny:qwen2-0.3m"
LORA = LoraConfig(enabled=True)


class NotMeasured(Exception):
    """Why there is no figure."""


class ProgramFailed(Exception):
    """Another program that a part needs has failed."""


@dataclass(frozen=True)
class Shape:
    """A model with random weights."""

    name: str
    config: dict[str, Any]
    lora: bool = False

    @property
    def learning_rate(self) -> float:
        """Large enough that one update moves logprobs by more than rounding does."""
        return 1e-2 if self.lora else 1e-4


@dataclass(frozen=True)
class Place:
    """Where it is measured."""

    device: str
    """`cuda` or `cpu`."""
    work: Path
    """Where models are kept between parts."""
    vllm_python: str | None = None
    why_no_vllm: str = ""

    @property
    def formats(self) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16)

    @property
    def native(self) -> torch.dtype:
        """The number format that a run would take."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def need_vllm(self) -> str:
        if self.vllm_python is None:
            raise NotMeasured(self.why_no_vllm)
        return self.vllm_python


TINY = {
    **known_shapes()["Qwen/Qwen3-0.6B"],
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}


def shapes_for(device: str) -> dict[str, Shape]:
    """By the name that parts end with."""
    if device == "cpu":
        found = [Shape("tiny", TINY), Shape("tiny-lora", TINY, lora=True)]
    else:
        known = known_shapes()
        found = [
            Shape("0.6b", known["Qwen/Qwen3-0.6B"]),
            Shape("1.7b", known["Qwen/Qwen3-1.7B"]),
            Shape("8b-lora", known["Qwen/Qwen3-8B"], lora=True),
        ]
    return {shape.name: shape for shape in found}


def model_of(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Always the same weights on one kind of device; adapters are not part of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = ModelSource.resolve(TOKENIZER)
    tokenizer = source.tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**{**shape.config, **ends})
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.config._name_or_path = source.path  # where the embedded engine finds a tokenizer
    return model.eval()


def folder_of(shape: Shape, place: Place) -> Path:
    """The model as files, for what can't take it from this process. Written once."""
    folder = place.work / "models" / shape.name.removesuffix("-lora")
    if (folder / "hf").is_dir():
        return folder / "hf"
    model = model_of(shape, place.device, place.native)
    size = sum(parameter.nbytes for parameter in model.parameters())
    place.work.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(place.work).free < 2.5 * size:
        raise NotMeasured(f"{place.work} has no room for {2.5 * size / GIB:.0f} GiB: name another folder with --work")
    draft = folder.with_name(f".{folder.name}-{os.getpid()}")
    write_model(model, ModelSource.resolve(TOKENIZER).tokenizer(), draft)
    draft.rename(folder)
    return folder / "hf"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_each_format(place: Place, measure: Callable[[torch.dtype], dict[str, Any]]) -> dict[str, Any]:
    """What does not fit in one format may fit in the other."""
    rows: dict[str, Any] = {}
    for dtype in place.formats:
        try:
            rows[dtype_name(dtype)] = measure(dtype)
        except torch.cuda.OutOfMemoryError:
            rows[dtype_name(dtype)] = {"not_measured": "it does not fit into the GPU's memory"}
        forget()
    if all("not_measured" in row for row in rows.values()):
        raise NotMeasured("it does not fit into the GPU's memory")
    return {"ok": all(row.get("ok", True) for row in rows.values()), **rows}


def forget() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
