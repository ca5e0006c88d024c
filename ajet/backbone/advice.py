"""What to change after an error that the user can mend: `memory_advice` after a run has used up the memory of the GPU
or the machine, `place_advice` after a file or folder that can't be used.
"""

from __future__ import annotations

import errno
import os
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


ADVICE = {
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "choose a place that you may use, or change its permissions",
    errno.EPERM: "choose a place that you may use, or change its permissions",
    errno.ENOSPC: "make room, or choose a place on another disk",
    errno.EDQUOT: "make room, or choose a place on another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "one of these folders is a file: choose another place",
    errno.EISDIR: "this is a folder: name a file",
    errno.ELOOP: "its links lead in a circle: choose another place",
}
"""What the user can do about an operating system's refusal."""


def place_advice(error: BaseException) -> str | None:
    """The message, or None if the error is none of these or says no place."""
    if not isinstance(error, OSError) or error.errno not in ADVICE or error.filename is None:
        return None
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    shown = place if len(place) <= 200 else f"{place[:100]}…{place[-60:]}"
    return f"{shown}: {error.strerror}\n    {ADVICE[error.errno]}"
