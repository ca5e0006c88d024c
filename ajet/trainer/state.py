"""What a checkpoint holds of a trainer: weights, optimiser and random states, as safetensors and JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ajet.trainer.checkpoint import Checkpoint, CheckpointError
from ajet.trainer.trainer import Trainer


def write_trainer(trainer: Trainer, tokenizer: Any, folder: Path) -> None:
    """Fill a checkpoint folder (all but `state.json` and the marker)."""
    write_model(trainer.model, tokenizer, folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.optimizer.tensors().items()}
    save_file(tensors, folder / "optimizer.safetensors")
    save_file(_random_states(), folder / "rng.safetensors", metadata={"python": json.dumps(random.getstate())})


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """`hf/` with whole weights (LoRA merged in), and the adapter alone if there is one."""
    from transformers.utils import logging

    # a bar for every checkpoint would break up the lines of the run
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if hasattr(model, "disable_adapter"):
        import copy

        model.save_pretrained(folder / "adapter")
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder / "hf")
    else:
        model.save_pretrained(folder / "hf")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "hf")


def read_trainer(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Bring a freshly built trainer to the checkpoint's state."""
    path = checkpoint.path
    try:
        _read_weights(trainer.model, path)
        trainer.optimizer.load(load_file(path / "optimizer.safetensors"))
        _restore_random_states(path / "rng.safetensors")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit this model ({error}): start anew with --fresh, or set "
            "trainer_common.resume to another checkpoint"
        ) from error
    trainer.updates = int(checkpoint.state["updates"])


def _read_weights(model: Any, path: Path) -> None:
    """In place: an engine that shares the parameters keeps sharing them."""
    if (path / "adapter").is_dir():
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(path / "adapter" / "adapter_model.safetensors"))
        return
    stored: dict[str, Tensor] = {}
    for file in sorted((path / "hf").glob("*.safetensors")):
        stored.update(load_file(file))
    missing, unexpected = model.load_state_dict(stored, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise ValueError(f"missing {sorted(set(missing) - tied)[:3]}, unexpected {unexpected[:3]}")


def _random_states() -> dict[str, Tensor]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    assert name == "MT19937"
    states = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_rest": torch.tensor([float(position), float(has_gauss), float(gauss)], dtype=torch.float64),
    }
    for index in range(torch.cuda.device_count()):
        states[f"cuda.{index}"] = torch.cuda.get_rng_state(index)
    return states


def _restore_random_states(file: Path) -> None:
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        states = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a dict)
        version, internal, gauss_next = json.loads(stream.metadata()["python"])
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(states["torch"])
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    keys = states["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)
