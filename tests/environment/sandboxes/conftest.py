"""Sandboxes of every kind and mode that this machine can make."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ajet.environment.sandboxes.cgroups import Cgroup

MODES = ("best", "no cgroup")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the sandbox is made: as well as this machine can, or with less."""
    if request.param == "no cgroup":
        nothing: Callable[..., None] = lambda **_: None  # noqa: E731
        monkeypatch.setattr(Cgroup, "create", nothing)
    return str(request.param)
