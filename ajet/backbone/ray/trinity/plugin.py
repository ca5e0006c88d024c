"""What each process of a run does before Trinity is imported: Ray calls `install` when a worker starts.

Trinity 0.6 imports a few names of vLLM wherever it handles models. On a machine without a GPU vLLM isn't installed and
none of them is ever used, so stand-ins take their place.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ajet.backbone.ray.start import on_cpu

HOOK = "ajet.backbone.ray.trinity.plugin.install"

_STAND_INS: dict[str, tuple[str, ...]] = {
    "vllm": (),
    "vllm.config": ("ModelConfig",),
    "vllm.entrypoints": (),
    "vllm.entrypoints.chat_utils": (
        "ChatTemplateContentFormat",
        "ConversationMessage",
        "parse_chat_messages",
        "parse_chat_messages_async",
    ),
    "vllm.inputs": ("MultiModalDataDict",),
}


def install() -> None:
    """Make Trinity importable without vLLM, if this is a run on the CPU."""
    if not on_cpu() or "vllm" in sys.modules or find_spec("vllm") is not None:
        return
    for name, members in _STAND_INS.items():
        module: Any = ModuleType(name, "Stands in for vLLM, which is not installed.")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for member in members:
            setattr(module, member, _Absent)
        sys.modules[name] = module


class _Absent:
    """A name of vLLM's that is never used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("vLLM is not installed in this environment")
