"""The kinds of sandbox, by the names that a config gives them."""

from __future__ import annotations

from typing import Literal

SandboxKind = Literal["bubblewrap", "docker", "podman", "kubernetes", "none"]
