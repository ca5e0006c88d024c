"""Sandboxes of every kind and mode that this machine can make."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ajet.sandbox import SandboxError
from ajet.sandbox.bubblewrap_arguments import probe
from ajet.sandbox.cgroups import Cgroup

MODES = ("best", "no cgroup")


def has_bubblewrap() -> bool:
    try:
        probe()
    except SandboxError:
        return False
    return True


needs_bubblewrap = pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap can't make namespaces here")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the sandbox is made: as well as this machine can, or with less."""
    if request.param == "no cgroup":
        nothing: Callable[..., None] = lambda **_: None  # noqa: E731
        monkeypatch.setattr(Cgroup, "create", nothing)
    return str(request.param)
