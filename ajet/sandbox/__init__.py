"""Confined places in which episodes run commands: see `sandbox`."""

from ajet.sandbox.opening import check_sandbox, open_sandbox
from ajet.sandbox.result import Result, UnusableResultError, fresh_copy
from ajet.sandbox.sandbox import ExecResult, Sandbox, SandboxError, SandboxSettings

__all__ = [
    "ExecResult",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxSettings",
    "UnusableResultError",
    "check_sandbox",
    "fresh_copy",
    "open_sandbox",
]
