"""`open_sandbox`: a sandbox of the kind that the settings name."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

from ajet.config.kinds import SANDBOXES, load
from ajet.environment.sandboxes.host import Hosted, on_host
from ajet.environment.sandboxes.sandbox import Sandbox, SandboxSettings


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
    sandbox: _Startable = load(SANDBOXES, settings.kind)(settings, gateway_url)
    return sandbox


def check_sandbox(settings: SandboxSettings) -> None:
    """Raises `SandboxError` if no such sandbox can be made on this machine: before a run, not in its first episode."""
    load(SANDBOXES, settings.kind).check(settings)
