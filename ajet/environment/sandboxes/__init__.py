"""Confined places in which episodes run commands: see `sandbox`."""

from ajet.environment.sandboxes.opening import (
    Result,
    UnusableResultError,
    check_sandbox,
    fresh_copy,
    fresh_sandbox,
    open_sandbox,
)
from ajet.environment.sandboxes.sandbox import ExecResult, Input, Sandbox, SandboxError, SandboxSettings

__all__ = [
    "ExecResult",
    "Input",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxSettings",
    "UnusableResultError",
    "check_sandbox",
    "fresh_copy",
    "fresh_sandbox",
    "open_sandbox",
]
