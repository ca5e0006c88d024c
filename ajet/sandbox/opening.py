"""`open_sandbox`: a sandbox of the kind that the settings name."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from ajet.sandbox.host import Hosted, on_host
from ajet.sandbox.sandbox import Sandbox, SandboxSettings


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


def _made(settings: SandboxSettings, gateway_url: str | None) -> _Startable:
    if settings.kind == "bubblewrap":
        from ajet.sandbox.bubblewrap import BubblewrapSandbox

        return BubblewrapSandbox(settings, gateway_url)
    if settings.kind in ("docker", "podman"):
        from ajet.sandbox.container import ContainerSandbox

        return ContainerSandbox(settings, gateway_url)
    if settings.kind == "none":
        from ajet.sandbox.unconfined import UnconfinedSandbox

        return UnconfinedSandbox(settings, gateway_url)
    from ajet.sandbox.kubernetes import KubernetesSandbox

    return KubernetesSandbox(settings, gateway_url)


def check_sandbox(settings: SandboxSettings) -> None:
    """Raises `SandboxError` if no such sandbox can be made on this machine: before a run, not in its first episode."""
    if settings.kind == "bubblewrap":
        from ajet.sandbox.bubblewrap_arguments import check
    elif settings.kind in ("docker", "podman"):
        from ajet.sandbox.container import check
    elif settings.kind == "none":
        from ajet.sandbox.unconfined import check
    else:
        from ajet.sandbox.kubernetes import check
    check(settings)
