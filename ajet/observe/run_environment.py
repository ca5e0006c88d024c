"""`run_environment`: what a run ran on: commit, versions, machine. Kept as `environment.json` in its folder."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("agentjet", "torch", "transformers", "vllm", "verl", "trinity-rft", "ray", "openai", "agentscope", "peft")
_WAIT_S = 5.0
_GIB = 1024**3


def run_environment() -> dict[str, str]:
    """By name. Only what is there is named."""
    found = {"Python": f"{platform.python_version()}, {sys.prefix}", "system": platform.platform()}
    found["machine"] = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / _GIB:.1f} GiB memory"
    if gpus := _said("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"):
        found["GPUs"] = "; ".join(gpus.splitlines())
    for label, folder in (("commit here", Path.cwd()), ("commit of ajet", Path(__file__).parent)):
        if commit := _said("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"):
            found[label] = commit
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["command"] = " ".join(sys.argv)
    return found


def _said(program: str, *arguments: str) -> str:
    """What a program says; empty if it is absent or fails."""
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
