"""Checkpoints: weights, optimiser and random states, as safetensors and JSON (no pickle), complete or absent.

    step_20/
      hf/              what `transformers.from_pretrained` and vLLM load
      adapter/         LoRA only: the adapter alone
      reference.safetensors  the KL term's reference, where it moves
      optimizer.safetensors  rng.safetensors  trainer.json  state.json
      COMPLETE         written last: every file with its size and SHA-256

A checkpoint is written under another name, synced, and renamed. If it is incomplete, or its files don't match the
marker, the previous one is used instead. Importing this module doesn't load torch.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from ajet.engine.model_source import stored_weights
from ajet.schema.errors import FRESH, UserError

if TYPE_CHECKING:
    from ajet.trainer.trainer import Updater

log = logging.getLogger("ajet.trainer")

MARKER = "COMPLETE"
PREFIX = "step_"
ASIDE = "earlier_"
"""Before the name of a checkpoint that belongs to the run no longer."""
REFERENCE = "reference.safetensors"


class CheckpointError(UserError):
    """A checkpoint can't be used."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    state: dict[str, Any]
    """The content of `state.json`."""


class CheckpointFolder:
    """The checkpoints of one experiment."""

    def __init__(self, root: Path, *, keep: int = 3, keep_best: bool = True) -> None:
        self.root = root
        self.keep = keep
        self.keep_best = keep_best

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Checkpoint | None:
        """Let `write(folder)` fill a new checkpoint, and make it durable. If the disk fails: a warning, and None.

        `state` must be JSON; its `score`, if any, decides which checkpoint is the best.
        """
        draft = self.root / f".{PREFIX}{step}.{os.getpid()}"
        final = self.root / f"{PREFIX}{step}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            draft.mkdir()
            write(draft)
            (draft / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
            seal(draft)
            if final.exists():  # the same step from before a resume, moved aside: removing it takes longer
                final.rename(draft.with_suffix(".old"))
            draft.rename(final)
            _sync(self.root)
            shutil.rmtree(draft.with_suffix(".old"), ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            there = next(place for place in (self.root, *self.root.parents) if place.is_dir())
            log.warning(
                "the checkpoint of step %d could not be written to %s, where %.1f MB are free (%s); the run goes on, "
                "and tries again at its next checkpoint",
                *(step, self.root, shutil.disk_usage(there).free / 2**20, error),
            )
            return None
        self._prune()
        return Checkpoint(final, step, {"step": step, **state})

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint. Damaged ones are skipped with a warning."""
        for path in self._folders():
            try:
                return load(path)
            except CheckpointError as error:
                log.warning("%s; using the previous one", error)
        return None

    def rewind(self, step: int) -> None:
        """The run resumes after `step`: put later checkpoints aside, which would be taken for its newest."""
        for path in self._folders():
            if step_of(path) > step:
                aside = path.with_name(f"{ASIDE}{path.name}")
                shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
                path.rename(aside)
                log.info(
                    "the run goes on after step %d: its checkpoint of step %d is now %s", step, step_of(path), aside
                )

    def best(self) -> Path | None:
        """The checkpoint with the highest score; the newest of several."""
        scored = [(score, path) for path in self._folders() if (score := _score(path)) is not None]
        return max(scored, key=lambda pair: (pair[0], step_of(pair[1])))[1] if scored else None

    def point(self, link: Path, checkpoint: Checkpoint) -> None:
        """Atomically make the symbolic link `link` point to the checkpoint's Hugging Face folder. If the disk fails, or
        knows no links: a warning."""
        draft, weights = link.with_name(f".{link.name}.{os.getpid()}"), checkpoint.path / "hf"
        try:
            draft.unlink(missing_ok=True)
            draft.symlink_to(os.path.relpath(weights, link.parent), target_is_directory=True)
            draft.replace(link)
        except OSError as error:
            log.warning("%s can't lead to the newest weights (%s): they are in %s", link, error.strerror, weights)

    def _folders(self) -> list[Path]:
        """Newest first. A folder without a marker isn't a checkpoint."""
        if not self.root.is_dir():
            return []
        found = [path for path in self.root.iterdir() if step_of(path) >= 0 and (path / MARKER).is_file()]
        return sorted(found, key=step_of, reverse=True)

    def _prune(self) -> None:
        folders = self._folders()
        best = self.best() if self.keep_best else None
        for path in folders[self.keep :]:
            if path == best:
                continue
            try:
                (path / MARKER).unlink()  # first: a half-removed folder must not look complete
            except OSError as error:  # another user's, who resumed the run in between
                log.warning("%s can't be removed, and stays: %s", path, error.strerror)
                continue
            shutil.rmtree(path, ignore_errors=True)  # what somebody still reads is swept away later

    def _sweep(self) -> None:
        """Remove what earlier processes left half-written."""
        for path in self.root.iterdir():
            unsealed = step_of(path) >= 0 and not (path / MARKER).is_file()
            if path.is_dir() and (path.name.startswith(f".{PREFIX}") or unsealed):
                shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name; -1 for anything else."""
    number = path.name.removeprefix(PREFIX)
    return int(number) if path.name.startswith(PREFIX) and number.isdecimal() else -1


def load(path: Path) -> Checkpoint:
    """Read a checkpoint's state after checking every file against the marker. One that can't be read at present, for
    lack of permission or of a disk, may be whole: that is an `OSError`, and no reason to go on from an earlier one."""
    try:
        listed: dict[str, list[Any]] = json.loads((path / MARKER).read_text())
        for name, (size, digest) in listed.items():
            file = path / name
            if file.stat().st_size != size or _digest(file) != digest:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} has changed since it was written")
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        return Checkpoint(path, int(state["step"]), state)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} is incomplete or unreadable: {error}") from error


def seal(folder: Path) -> None:
    """Sync every file and directory, then write the marker."""
    share(folder)
    listed = {}
    for path in sorted((folder, *folder.rglob("*"))):
        if path.is_file():
            listed[str(path.relative_to(folder))] = [path.stat().st_size, _digest(path)]
        _sync(path)
    marker = folder / MARKER
    marker.write_text(json.dumps(listed, indent=1))
    _sync(marker)
    _sync(folder)


def share(folder: Path) -> None:
    """Let those read the weights who may read the folder: safetensors makes its files for their owner alone."""
    for file in folder.rglob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _score(path: Path) -> float | None:
    try:
        score = json.loads((path / "state.json").read_text()).get("score")
    except (OSError, ValueError):
        return None
    return float(score) if score is not None else None


def write_trainer(trainer: Updater, tokenizer: Any, folder: Path) -> None:
    """Fill a checkpoint folder with everything but `state.json` and the marker."""
    from safetensors.torch import save_file

    write_model(trainer.model, tokenizer, folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.optimizer.tensors().items()}
    save_file(tensors, folder / "optimizer.safetensors")
    if trainer.settings.reference_sync and trainer.reference is not None:
        named = trainer.reference.named_parameters()
        save_file({name: value.detach().cpu().contiguous() for name, value in named}, folder / REFERENCE)
    counts = {"updates": trainer.updates, "steps": trainer.steps, "kl_coef": trainer.kl_coef}
    if trainer.optimizer.in_float16:
        counts["loss_scale"] = trainer.optimizer.loss_scale
    (folder / "trainer.json").write_text(json.dumps(counts))
    _write_random_states(folder / "rng.safetensors")


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write `hf/` with the whole weights (LoRA merged in), and the adapter alone if there is one."""
    from transformers.utils import logging

    # a progress bar per checkpoint would break up the run's output
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if hasattr(model, "disable_adapter"):
        from ajet.engine.quantization import merged_weights

        model.save_pretrained(folder / "adapter")
        base = model.get_base_model()
        base.save_pretrained(folder / "hf", state_dict=merged_weights(model))
        ends = base.get_input_embeddings(), base.get_output_embeddings()
        adapted = any(hasattr(layer, "get_delta_weight") for layer in ends)
        if adapted and len(base.all_tied_weights_keys) == 1:  # merged, the two differ. Zamba 2's key ties blocks, too
            config = copy.deepcopy(base.config)
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
            config.save_pretrained(folder / "hf")
    else:
        model.save_pretrained(folder / "hf")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "hf")


def read_trainer(trainer: Updater, checkpoint: Checkpoint) -> None:
    """Restore the checkpoint's state into a newly built trainer."""
    from safetensors.torch import load_file

    path = checkpoint.path
    try:
        _read_weights(trainer.model, path)
        trainer.optimizer.load(load_file(path / "optimizer.safetensors"))
        _read_reference(trainer, path)
        counts = json.loads((path / "trainer.json").read_text())
        _restore_random_states(path / "rng.safetensors")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        why = " ".join(str(error).split("\n")[:2]).replace("\t", "")  # PyTorch names every weight
        raise CheckpointError(
            f"checkpoint {path} does not fit this model ({why}): start over with {FRESH}, or set "
            "trainer_common.resume to another checkpoint"
        ) from error
    trainer.updates, trainer.steps = int(counts["updates"]), int(counts["steps"])
    if trainer.settings.kl_adaptive is not None:
        trainer.kl_coef = float(counts["kl_coef"])
    if trainer.optimizer.in_float16 and "loss_scale" in counts:
        trainer.optimizer.loss_scale = float(counts["loss_scale"])


def _read_reference(trainer: Updater, path: Path) -> None:
    """A reference that moves. A run that lets it move only from now on starts with the one it was built with."""
    from safetensors.torch import load_file

    if not trainer.settings.reference_sync or trainer.reference is None or not (path / REFERENCE).is_file():
        return
    trainer.reference.load_state_dict(load_file(path / REFERENCE), strict=False)


def _read_weights(model: Any, path: Path) -> None:
    """Read weights in place, so that an engine that shares the parameters keeps sharing them."""
    with_adapter = (path / "adapter").is_dir()
    if with_adapter != hasattr(model, "peft_config"):
        now, then = ("without", "with") if with_adapter else ("with", "without")
        raise ValueError(f"this run is {now} LoRA, the checkpoint's was {then} it")
    if with_adapter:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(model, load_file(path / "adapter" / "adapter_model.safetensors"))
        return
    model.load_state_dict(stored_weights(path / "hf", model))


def _write_random_states(file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    states = {"torch": torch.get_rng_state()}
    for index in range(torch.cuda.device_count()):
        states[f"cuda.{index}"] = torch.cuda.get_rng_state(index)
    numpy = json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)
    save_file(states, file, metadata={"python": json.dumps(random.getstate()), "numpy": numpy})


def _restore_random_states(file: Path) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        states = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a dict)
        version, internal, gauss_next = json.loads(stream.metadata()["python"])
        np.random.set_state(json.loads(stream.metadata()["numpy"]))
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(states["torch"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)
