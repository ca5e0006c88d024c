"""What vLLM's workers run for us, in vLLM's Python. It imports nothing of ajet, whose packages may be absent there.

vLLM mixes `AjetWorker` into its worker class (`--worker-extension-cls`); `collective_rpc` calls it by name.
"""

from __future__ import annotations

from typing import Any


class AjetWorker:
    """Methods that vLLM's workers get."""

    def ajet_reload_weights(self, weights_path: str) -> None:
        """Load new weights in place, from a folder.

        On a CPU, each linear layer multiplies by a packed copy of its weight. vLLM packs again the layers that it
        loaded, and so forgets an output layer that shares the embedding's weight: no file has it under its own name.
        """
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        for layer in worker.get_model().modules():
            if hasattr(layer, "cpu_linear") and hasattr(getattr(layer, "quant_method", None), "embedding"):
                layer.quant_method.process_weights_after_loading(layer)
