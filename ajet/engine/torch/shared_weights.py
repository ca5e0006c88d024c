"""`SharedWeights`: a model's weights in memory that two processes have: the trainer's and the engine's.

The memory has no name and no file: a child gets it as an open descriptor. What one process writes in place, the other
one reads, so an update copies nothing.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ajet.schema.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALIGNED = 64
"""Bytes: each tensor begins at a multiple, as PyTorch's own do."""


class Placed(msgspec.Struct, frozen=True):
    """Where a tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SharedWeights:
    """Shared memory, and the layout of the weights in it. `use_shared` has another model compute with them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Move a model's weights into such memory: from now on it computes with these, and so may others."""
        self.layout: list[Placed] = []
        self._addresses: dict[str, int] = {}
        size = self._lay_out(model)
        self.descriptor = os.memfd_create("ajet-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, max(size, 1))
        except OSError as error:
            os.close(self.descriptor)
            raise EngineError(
                f"rollout.engine_process: {size / 1e9:.1f} GB of shared memory for the weights can't be had "
                f"({error.strerror}): leave engine_process out"
            ) from error
        own = dict(tensors(model))
        for name, view in views(self.descriptor, self.layout):
            view.copy_(own[name].data)
            own[name].data = view
            self._addresses[name] = view.data_ptr()

    def _lay_out(self, model: PreTrainedModel) -> int:
        """Give each weight its place. Returns the bytes that all need."""
        size = 0
        for name, tensor in tensors(model):
            size += -size % ALIGNED
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.layout.append(Placed(name, dtype, tuple(tensor.shape), size))
            size += tensor.numel() * tensor.element_size()
        return size

    def check(self, model: PreTrainedModel) -> None:
        """Raise if the model no longer computes with these weights, because somebody gave it other tensors."""
        moved = [name for name, tensor in tensors(model) if tensor.data_ptr() != self._addresses[name]]
        if moved:
            raise EngineError(f"{moved[0]} was replaced instead of changed in place: the engine's process can't see it")

    def close(self) -> None:
        """No further process gets the memory; it lasts as long as a model uses it."""
        os.close(self.descriptor)


def use_shared(model: PreTrainedModel, descriptor: int, layout: list[Placed]) -> None:
    """Have a model of the same shape compute with the weights behind this descriptor."""
    own = dict(tensors(model))
    for name, view in views(descriptor, layout):
        own[name].data = view


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """All weights; one that has several names under its first."""
    seen: set[int] = set()
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def views(descriptor: int, layout: list[Placed]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in this memory. Each keeps the mapping alive."""
    memory = mmap.mmap(descriptor, 0)
    for place in layout:
        dtype: torch.dtype = getattr(torch, place.dtype)
        count = 1
        for side in place.shape:
            count *= side
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=place.offset)
            yield place.name, flat.view(place.shape)
        else:
            yield place.name, torch.empty(place.shape, dtype=dtype)
