"""The embedded engine: continuous batching over any Hugging Face causal model, in this process.

From the outside in: `engine` (the `Engine` and the messages to its thread), `worker` (the thread), `scheduler` (who
computes what in the next step), `kv_cache` (what is computed already, and where it is stored), `runner` (one forward
pass, and the tokens drawn from it), `attention` and its `readers`, `states`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.engine.torch.commands import TorchEngineSettings as TorchEngineSettings
    from ajet.engine.torch.engine import TorchEngine as TorchEngine
    from ajet.engine.torch.kv_cache import LayerState as LayerState
    from ajet.engine.torch.runner import ServedShape as ServedShape
    from ajet.engine.torch.states import LayerCache as LayerCache
    from ajet.engine.torch.states import Mixer as Mixer
    from ajet.engine.torch.states import mixers_of as mixers_of
    from ajet.engine.torch.worker import CPU_SHARE as CPU_SHARE
    from ajet.engine.torch.worker import FULL_LENGTH_CACHE as FULL_LENGTH_CACHE
    from ajet.engine.torch.worker import GPU_SHARE as GPU_SHARE

__getattr__ = lazily(
    __name__,
    {
        "CPU_SHARE": "worker",
        "FULL_LENGTH_CACHE": "worker",
        "GPU_SHARE": "worker",
        "LayerCache": "states",
        "LayerState": "kv_cache",
        "Mixer": "states",
        "ServedShape": "runner",
        "TorchEngine": "engine",
        "TorchEngineSettings": "commands",
        "mixers_of": "states",
    },
)
