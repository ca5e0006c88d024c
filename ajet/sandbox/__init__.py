"""Confined places in which episodes run commands: see `sandbox`."""

from ajet.sandbox.opening import open_sandbox
from ajet.sandbox.sandbox import ExecResult, Sandbox, SandboxError, SandboxSettings

__all__ = ["ExecResult", "Sandbox", "SandboxError", "SandboxSettings", "open_sandbox"]
