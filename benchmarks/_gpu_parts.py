"""What `gpu_check.py` measures: each function is one part, for one shape of model with random weights.

A part answers with figures; `ok` says whether what can be right or wrong is right. `NotMeasured` says why there are
none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _gpu_correctness import gradient, logprobs, vllm
from _gpu_kernels import kernels
from _gpu_memory import memory
from _gpu_models import NotMeasured, Place, ProgramFailed, Shape, shapes_for
from _gpu_speed import engine, layouts, step

from ajet.schema.errors import UserError

PARTS: dict[str, Callable[[Shape, Place], dict[str, Any]]] = {
    part.__name__: part for part in (gradient, logprobs, vllm, memory, kernels, layouts, engine, step)
}


def measure(part: str, shape: str, place: Place) -> dict[str, Any]:
    """One part's figures, or the reason why there are none."""
    try:
        return PARTS[part](shapes_for(place.device)[shape], place)
    except NotMeasured as why:
        return {"not_measured": str(why)}
    except torch.cuda.OutOfMemoryError:
        return {"not_measured": "it does not fit into the GPU's memory"}
    except (UserError, ProgramFailed) as error:
        return {"ok": False, "error": str(error)}


def main() -> None:
    """`_gpu_parts.py JOB`: measures what the file says, and writes the figures beside it."""
    job = Path(sys.argv[1])
    told = json.loads(job.read_text())
    place = Place(told["device"], Path(told["work"]), told["vllm_python"], told["why_no_vllm"])
    job.with_suffix(".figures").write_text(json.dumps(measure(told["part"], told["shape"], place)))


if __name__ == "__main__":
    main()
