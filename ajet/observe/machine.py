"""How busy this machine is: memory of this process, load, and the GPU if torch is loaded and has one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_GIB = 1024**3


def process_memory_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine_load() -> str:
    """One line for a dashboard."""
    parts = [f"{process_memory_bytes() / _GIB:.1f} GiB", f"load {os.getloadavg()[0]:.1f}/{os.cpu_count()}"]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        parts.append(f"GPU {(total - free) / _GIB:.1f}/{total / _GIB:.0f} GiB")
    return "  ".join(parts)
