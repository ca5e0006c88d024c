"""`open_sandbox`: a sandbox of the kind that the settings name."""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from ajet.environment.sandboxes.host import Hosted, on_host
from ajet.environment.sandboxes.sandbox import Sandbox, SandboxSettings
from ajet.schema.sandbox_kind import SandboxKind


class open_sandbox:
    """`sandbox = await open_sandbox(settings)`, or `async with open_sandbox(settings) as sandbox`.

    `gateway_url`: the run's gateway, for `network: gateway`. Raises `SandboxError` that says what is missing.
    """

    def __init__(self, settings: SandboxSettings | None = None, gateway_url: str | None = None) -> None:
        self._settings = settings or SandboxSettings()
        self._gateway_url = gateway_url
        self._sandbox: Sandbox | None = None

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self._open().__await__()

    async def __aenter__(self) -> Sandbox:
        self._sandbox = await self._open()
        return self._sandbox

    async def __aexit__(self, *_: object) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _open(self) -> Sandbox:
        sandbox = _made(self._settings, self._gateway_url)
        await on_host(sandbox.start())
        return Hosted(sandbox)


class _Startable(Sandbox, Protocol):
    async def start(self) -> None: ...


class _Kind(NamedTuple):
    """Where a kind is defined, as `module:name`. Imported on use."""

    sandbox: str
    check: str
    """Raises `SandboxError` if no such sandbox can be made on this machine."""


KINDS: dict[SandboxKind, _Kind] = {
    "bubblewrap": _Kind(
        "ajet.environment.sandboxes.bubblewrap:BubblewrapSandbox",
        "ajet.environment.sandboxes.bubblewrap_arguments:check",
    ),
    "docker": _Kind(
        "ajet.environment.sandboxes.container:ContainerSandbox", "ajet.environment.sandboxes.container:check"
    ),
    "podman": _Kind(
        "ajet.environment.sandboxes.container:ContainerSandbox", "ajet.environment.sandboxes.container:check"
    ),
    "kubernetes": _Kind(
        "ajet.environment.sandboxes.kubernetes:KubernetesSandbox", "ajet.environment.sandboxes.kubernetes:check"
    ),
    "none": _Kind(
        "ajet.environment.sandboxes.unconfined:UnconfinedSandbox", "ajet.environment.sandboxes.unconfined:check"
    ),
}


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _made(settings: SandboxSettings, gateway_url: str | None) -> _Startable:
    sandbox: _Startable = _found(KINDS[settings.kind].sandbox)(settings, gateway_url)
    return sandbox


def check_sandbox(settings: SandboxSettings) -> None:
    """Raises `SandboxError` if no such sandbox can be made on this machine: before a run, not in its first episode."""
    _found(KINDS[settings.kind].check)(settings)
