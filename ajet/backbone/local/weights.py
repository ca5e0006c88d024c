"""`WeightFolder`: brings the trainer's weights of a version to an engine with weights of its own.

The embedded engine computes with the trainer's own parameters: there is nothing to bring. Every other engine reads each
version from a folder: whole weights as `transformers` saves them, or a LoRA adapter.
The folders are private to this user, in the machine's shared memory where they fit, and `rollout.weights_folder` puts
them elsewhere. A version's folder appears whole, and is removed once the engine serves the next one.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from ajet.engine.model_source import ModelSource
from ajet.schema.errors import ConfigError
from ajet.trainer.checkpoint import share

if TYPE_CHECKING:
    from ajet.config import Config

log = logging.getLogger("ajet.backbone.local")

PREFIX = "ajet-trained-"
LOCK = "in_use"
"""In each run's folder: locked while the run lives, so that the next run can tell what a killed one left behind."""
SHARED_MEMORY = Path("/dev/shm")
VERSIONS_AT_ONCE = 3
"""The one that is served, the one that is written, and as much again for everybody else."""


class WeightFolder:
    """A model of the trainer's own, written into a folder for each version."""

    def __init__(self, config: Config, device: str | None) -> None:
        import torch

        model = config.ajet.model
        self.model: Any = ModelSource.resolve(model.path).model(model.dtype, model.attn, device)
        self.cpu_threads: int = torch.get_num_threads()
        size = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        self._root, self._lock = _open_folder(config.ajet.rollout.weights_folder, size)
        self._written: list[Path] = []
        """In the order of their versions; those before the latest are removed once it is served."""
        self._count = itertools.count()
        self._close = weakref.finalize(self, _remove, self._root, self._lock)

    def source(self, model: Any, version: int) -> Path:
        """A folder with this version: the adapter alone if there is one, else the whole model."""
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        final = self._root / f"version-{version}-{next(self._count)}"
        draft = self._root / f".{final.name}"
        try:
            model.save_pretrained(draft)
            share(draft)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"ajet.rollout.weights_folder: the weights of version {version} could not be written to {self._root} "
                f"({getattr(error, 'strerror', None) or error}): name a folder with more room"
            ) from error
        draft.rename(final)
        self._written.append(final)
        return final

    def served(self) -> None:
        """The engine serves the latest: remove the others."""
        for folder in self._written[:-1]:
            shutil.rmtree(folder)
        del self._written[:-1]

    def close(self) -> None:
        """Remove everything. To be called when the engine has ended."""
        self._close()


def _open_folder(given: str | None, size: int) -> tuple[Path, int]:
    if given is None:
        room = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        base = SHARED_MEMORY if room > VERSIONS_AT_ONCE * size else Path(tempfile.gettempdir())
    else:
        base = Path(given).expanduser()
    try:
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    except OSError as error:
        raise ConfigError(
            f"ajet.rollout.weights_folder: {base} can't be written to ({error.strerror or error}): name another folder"
        ) from error
    if given is not None:
        root.chmod(0o755)  # somebody else's server may read there: that is what the key is for
    return root, _locked(root / LOCK)


def _locked(file: Path) -> int:
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _sweep(base: Path) -> None:
    """Remove what runs of this user left behind that were killed: it may be the machine's memory."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, or in use
            if folder.stat().st_uid == os.getuid() and (folder / LOCK).is_file():
                os.close(_locked(folder / LOCK))
                shutil.rmtree(folder)
                log.info("removed %s, which a run that was killed had left behind", folder)


def _remove(root: Path, lock: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    os.close(lock)
