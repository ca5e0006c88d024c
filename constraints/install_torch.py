"""Installs the PyTorch of `constraints/torch.txt` for `make env`.

A machine without an NVIDIA GPU gets the build for CPUs, which is smaller by gigabytes, if an index has it. Else it is
what pip's own index gives.

    python constraints/install_torch.py [INDEX]

An empty INDEX asks pip's own index alone.
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
import sys
import urllib.request
from importlib.metadata import distribution
from pathlib import Path

PIN = Path(__file__).with_name("torch.txt")
PATIENCE_S = 5.0
"""How long an index may take to answer."""
PROGRESS = "on" if sys.stdout.isatty() else "off"
PIP = [sys.executable, "-m", "pip", "install", "--progress-bar", PROGRESS, "--disable-pip-version-check"]


def without_gpu() -> bool:
    """Whether CUDA's packages would be of no use here. They exist for Linux and Windows alone."""
    return sys.platform != "darwin" and not Path("/dev/nvidiactl").exists() and not shutil.which("nvidia-smi")


def reachable(index: str) -> str:
    """Why the index can't be asked, or nothing."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=PATIENCE_S):
            return ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def install_cpu_build(index: str) -> bool:
    """Install PyTorch from this index. What it needs besides itself is locked, and here already."""
    if why := reachable(index):
        print(f"  no build for CPUs from {index} ({why}): taking what pip's own index gives", flush=True)
        return False
    command = [*PIP, "--no-deps", "--index-url", index, "--retries", "1", "--timeout", "30", "-r", str(PIN)]
    if subprocess.run(command, check=False).returncode:
        print(f"  {index} has no such build for this machine: taking what pip's own index gives", flush=True)
        return False
    return True


def size() -> str:
    """What is installed, and how much room it takes."""
    torch = distribution("torch")
    total = sum(file.stat().st_size for name in torch.files or () if (file := Path(str(name.locate()))).is_file())
    return f"PyTorch {torch.version}, {total / 1e9:.1f} GB"


def main() -> int:
    index = sys.argv[1] if len(sys.argv) > 1 else ""
    if not (without_gpu() and index and install_cpu_build(index)):
        done = subprocess.run([*PIP, "-r", str(PIN)], check=False)
        if done.returncode:
            return done.returncode
    print(f"  {size()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
