"""`Hosted`: a sandbox that can be used from any thread and any event loop.

All sandboxes of a process live on one thread of their own, with an event loop that never stops. So an episode whose
code blocks its loop, or that has none, reaches its sandbox all the same; and since the kernel ends a process when the
*thread* that started it ends, sandboxes end with this process and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from ajet.environment.sandboxes.sandbox import Command, ExecResult, Input, OnOutput, Sandbox, SandboxSettings

T = TypeVar("T")


class _Host:
    """The thread."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="ajet-sandboxes", daemon=True).start()


_lock = threading.Lock()
_host: _Host | None = None


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `work` on the sandboxes' thread."""
    global _host
    with _lock:
        if _host is None or _host.process != os.getpid():  # a fork has the object, but not the thread
            _host = _Host()
        return asyncio.run_coroutine_threadsafe(work, _host.loop)


async def on_host(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which runs on the sandboxes' thread. Cancelling it cancels the work, and waits for its end."""
    running = _submit(work)
    try:
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        running.cancel()
        raise


def run_on_host(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Wait for `work`, which runs on the sandboxes' thread, from any other one. Raises TimeoutError."""
    return _submit(work).result(seconds)


class Hosted:
    """A `Sandbox` in front of one that lives on the sandboxes' thread."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner

    @property
    def workspace(self) -> str:
        return self._inner.workspace

    @property
    def gateway_url(self) -> str | None:
        return self._inner.gateway_url

    @property
    def settings(self) -> SandboxSettings:
        return self._inner.settings

    @property
    def limits(self) -> Mapping[str, str]:
        return self._inner.limits

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | Input = b"",
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        relay = None if on_output is None else _Relay(on_output)
        take = None if relay is None else relay.take
        running = _submit(self._inner.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, on_output=take))
        if relay is not None:
            relay.stop = running.cancel
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if relay is not None and relay.failure is not None:
                raise relay.failure from None
            raise

    async def read(self, path: str) -> bytes:
        return await on_host(self._inner.read(path))

    async def write(self, path: str, content: bytes) -> None:
        await on_host(self._inner.write(path, content))

    async def end_processes(self) -> None:
        await on_host(self._inner.end_processes())

    async def reset(self) -> None:
        await on_host(self._inner.reset())

    async def close(self) -> None:
        # shielded: an episode that is cancelled while it closes its sandbox must not leave it
        await asyncio.shield(asyncio.wrap_future(_submit(self._inner.close())))

    def kill(self) -> None:
        self._inner.kill()

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Relay:
    """Calls the caller's function on the caller's event loop."""

    def __init__(self, on_output: OnOutput) -> None:
        self.failure: Exception | None = None
        self.stop: Callable[[], object] = lambda: None
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()

    def take(self, chunk: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop has closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._deliver, chunk)

    def _deliver(self, chunk: bytes) -> None:
        if self.failure is not None:
            return
        try:
            self._on_output(chunk)
        except Exception as error:  # noqa: BLE001 - the caller's function: raised where the command is awaited
            self.failure = error
            self.stop()
