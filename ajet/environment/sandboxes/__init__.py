"""Confined places in which episodes run commands: see `sandbox`."""

from ajet.environment.sandboxes.opening import check_sandbox, open_sandbox
from ajet.environment.sandboxes.sandbox import ExecResult, Sandbox, SandboxError, SandboxSettings

__all__ = ["ExecResult", "Sandbox", "SandboxError", "SandboxSettings", "check_sandbox", "open_sandbox"]
