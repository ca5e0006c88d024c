"""Weights on their way to vLLM: state dicts become folders that its workers read."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet.schema.errors import EngineError


class WeightFolders:
    """Finds or writes the folder of each version. Keeps the newest, for engines that have to be restarted."""

    def __init__(self) -> None:
        self._scratch: Path | None = None
        self.newest: Path | None = None

    def folder_of(self, source: Any, version: int) -> Path:
        """The folder with the weights of `source`: a state dict under Hugging Face's names, or a folder already."""
        if source is None:
            raise EngineError("vLLM shares no parameters with the trainer: pass load_weights a folder or a state dict")
        folder = self._write(source, version) if isinstance(source, Mapping) else Path(source)
        if not list(folder.glob("*.safetensors")):
            raise EngineError(f"{folder} has no .safetensors file")
        return folder

    def _write(self, weights: Mapping[str, Any], version: int) -> Path:
        from safetensors.torch import save_file

        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="ajet-weights-"))
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        folder = self._scratch / f"version-{version}"
        folder.mkdir(exist_ok=True)
        tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def announce(self, folder: Path | None) -> Path | None:
        """From now on, whatever starts again should serve this folder. Returns the one before, which stays as long as
        something may be reading it."""
        previous, self.newest = self.newest, folder
        return previous

    def remove(self, folder: Path | None) -> None:
        """Nothing reads this folder any more. It is deleted if it was written here."""
        if folder is not None and folder != self.newest and self._scratch in folder.parents:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete the folders that were written here."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
