"""`memory_advice`: what to change after a run has used up the memory of the GPU or the machine."""

from __future__ import annotations

import sys
from traceback import walk_tb

TRAINING = (
    "smaller batches of tokens (ajet.trainer_common.max_tokens_per_step), ajet.model.lora.enabled: true, "
    "ajet.trainer_common.optim.state_bits: 8, or a shorter ajet.rollout.max_model_len"
)
SERVING = "fewer replies at a time (ajet.rollout.max_num_seqs) or a shorter ajet.rollout.max_model_len"
LOADING = "a smaller model (ajet.model.path), or ajet.model.dtype: bfloat16"


def memory_advice(error: BaseException) -> str | None:
    """One line, with the keys that help. None for any other error."""
    if not _is_out_of_memory(error):
        return None
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
    doing, advice = "loading", LOADING
    for name in modules:
        if name.startswith("ajet.trainer"):
            doing, advice = "training", TRAINING
        elif name.startswith("ajet.engine.torch") and doing == "loading":
            doing, advice = "generating", SERVING
    said = str(error).strip().partition("\n")[0]
    return f"out of memory while {doing} ({said[:200]})\n    less memory is needed with {advice}"


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
