"""Log-probabilities by Liger's fused kernel: output layer and cross-entropy in one, on a CUDA GPU.

It computes in chunks and never keeps logits, as `output_head` does, with one kernel instead of several. It knows plain
output layers only: no adapters, no 4 bits, nothing after the projection. Importing this module doesn't load Liger.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from ajet.schema.errors import ConfigError, MissingDependencyError
from ajet.schema.install import install_command
from ajet.trainer.output_head import causal_model

KEY = "ajet.trainer_common.logits_kernel"
AFTER_THE_PROJECTION = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of configurations whose models change the logits that the output layer gives."""


def require_liger(device: str) -> None:
    """Raise unless the kernel can run on a device of this kind (`cpu` or `cuda`)."""
    _function()
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"{KEY}: liger needs a CUDA GPU, and this run trains on the {device.upper()}: set it to chunks, which "
            "computes the same, or leave it out"
        )


def why_not_liger(model: Any) -> str | None:
    """What the kernel doesn't know about this model; None if it knows everything."""
    causal = causal_model(model)
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output layer is a {type(head).__name__}"
    text = causal.config.get_text_config()
    changed = [key for key in AFTER_THE_PROJECTION if getattr(text, key, None) not in (None, 1.0)]
    return f"its logits are changed after the projection ({', '.join(changed)})" if changed else None


def fused_logprobs(model: Any, states_EW: Tensor, target_E: Tensor, temperature_E: Tensor | None) -> Tensor:
    """log_softmax(logits / temperature)[target] of every edge, from what the last layer gave."""
    head = causal_model(model).get_output_embeddings()
    if temperature_E is not None:  # without a bias, dividing before the projection is dividing after it
        if head.bias is not None:
            raise ValueError("its output layer has a bias, which no temperature may divide")
        states_EW = states_EW / temperature_E[:, None].to(states_EW.dtype)
    loss_E: Tensor = _function()(states_EW.contiguous(), head.weight, target_E, bias=head.bias, reduction="none")
    return -loss_E


def _function() -> Any:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise MissingDependencyError(
            f"{KEY}: liger needs liger-kernel ({error}): {install_command('liger')}"
        ) from error
    return liger_fused_linear_cross_entropy
