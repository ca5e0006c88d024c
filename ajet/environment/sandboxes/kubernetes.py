"""`KubernetesSandbox`: a pod per sandbox, in a cluster that a kubeconfig, or the pod that we run in, leads to.

A pod ends when it is closed; else by its deadline, with the pod that made it, or when the next sandbox finds that its
owner is gone. The image needs a POSIX shell and the usual small programs (busybox has them).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import posixpath
import secrets
import shlex
import time
from collections.abc import Mapping
from typing import Any

from ajet.environment.sandboxes import run_on_host
from ajet.environment.sandboxes.kubernetes_api import Cluster, PodOptions, pod
from ajet.environment.sandboxes.sandbox import (
    WORKSPACE,
    Confined,
    ExecResult,
    Execution,
    Input,
    Kept,
    SandboxError,
    SandboxSettings,
    result_of,
    within,
)

POLL_S = 0.5
END_S = 20.0
CHECK_S = 60.0
SWEEP_S = 60.0
"""How often, at most, one process looks for what others left."""
_NEVER_STARTS = frozenset(
    {
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
# Arguments of the request are part of its address, whose length is limited: what to run comes as the first input line.
_RUN = ["/bin/sh", "-c", 'IFS= read -r line; eval "$(printf %s "$line" | base64 -d)"']
_swept = {"at": float("-inf")}


class KubernetesSandbox(Confined):
    """Kind `kubernetes`."""

    @staticmethod
    def check(settings: SandboxSettings) -> None:
        """Raises `SandboxError` if the cluster can't make this sandbox, as far as it can be known before."""
        _check_settings(settings)

        async def asked() -> None:
            cluster = await Cluster.connect(PodOptions.of(settings))
            try:
                await cluster.sweep()
                if settings.network == "none":
                    await cluster.close_network()
            finally:
                await cluster.close()

        try:
            run_on_host(asked(), CHECK_S)
        except TimeoutError:
            raise SandboxError(f"sandbox kind kubernetes: the cluster did not answer within {CHECK_S:g} s") from None

    def __init__(self, settings: SandboxSettings, gateway_url: str | None = None) -> None:
        _check_settings(settings)
        super().__init__(settings)
        self._options = PodOptions.of(settings)
        self._cluster: Cluster | None = None
        self._name = ""

    @property
    def limits(self) -> Mapping[str, str]:
        network = {"none": "network policy, if the cluster's network enforces it", "host": "not limited"}
        return {
            "memory": "cgroup, the node's",
            "processes": "prlimit" if self._options.user is None else "prlimit, together with others of that user",
            "cpus": "cgroup, the node's",
            "disk": "size of the file system in memory",
            "time": "watched by the owner",
            "lifetime": "the pod's deadline",
            "network": network[self.settings.network],
            "system calls": "seccomp, the container runtime's own",
        }

    async def start(self) -> None:
        """Make it. Raises `SandboxError`."""
        try:
            self._cluster = cluster = await Cluster.connect(self._options)
            if time.monotonic() - _swept["at"] > SWEEP_S:
                _swept["at"] = time.monotonic()
                await cluster.sweep()
            if self.settings.network == "none":
                await cluster.close_network()
            self._name = f"ajet-{secrets.token_hex(8)}"
            await cluster.create(pod(self.settings, self._options, self._name, await cluster.own_pod()))
            await self._running(cluster)
        except BaseException:
            with contextlib.suppress(SandboxError):  # the first error says more
                await asyncio.shield(self.close())
            raise

    async def _running(self, cluster: Cluster) -> None:
        """Wait until the pod runs."""
        give_up = time.monotonic() + self._options.start_seconds
        while True:
            found = await cluster.pod(self._name)
            phase = found.status.phase if found is not None else "Gone"
            if phase == "Running":
                return
            why = _waits_for(found) if found is not None else ""
            never = phase not in ("Pending", "Unknown") or why.partition(":")[0] in _NEVER_STARTS
            if never or time.monotonic() > give_up:
                when = "" if never else f" within {self._options.start_seconds:g} s"
                raise SandboxError(f"the pod {self._name} did not start{when}: {why or phase}")
            await asyncio.sleep(POLL_S)

    # ------------------------------------------------------------ commands and files

    async def run(self, asked: Execution) -> ExecResult:
        cluster = self._live()
        started = time.perf_counter()
        stdout, stderr = (Kept(asked.output_bytes, asked.on_output) for _ in range(2))
        script = base64.b64encode(self._script(asked).encode()) + b"\n"
        running = cluster.run(self._name, _RUN, (script, asked.stdin), stdout, stderr)
        try:
            code, timed_out = await within(asked.seconds, running, lambda: self._end_all(cluster))
        except SandboxError as error:
            raise SandboxError(await self._why(cluster) or str(error)) from None
        return result_of(code, timed_out, started, stdout, stderr)

    def _script(self, asked: Execution) -> str:
        """What the shell inside does."""
        place = shlex.quote(posixpath.join(WORKSPACE, asked.folder))
        processes, disk = self.settings.processes, self.settings.disk_mb << 11  # blocks of 512 bytes
        variables = [f"{name}={value}" for name, value in asked.env.items()]
        run = "exec " + shlex.join([*(["env", *variables] if variables else []), *asked.arguments])
        if not isinstance(asked.stdin, Input):
            # input has no end of its own on this connection: what is wanted is counted off
            run = f"head -c {len(asked.stdin)} | {run}" if asked.stdin else f"{run} </dev/null"
        return (
            f"cd -- {place} 2>/dev/null || {{ echo cannot work in {place}: No such file or directory >&2; exit 1; }}\n"
            f"ulimit -u {processes} 2>/dev/null || ulimit -p {processes} 2>/dev/null\n"
            f"{{ ulimit -n 1024; ulimit -c 0; ulimit -f {disk}; }} 2>/dev/null\n{run}"
        )

    async def _end_all(self, cluster: Cluster) -> None:
        """End everything in the pod but its first process: nothing tells which command started what."""
        sent = base64.b64encode(b"kill -9 -1") + b"\n"
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(END_S):
                await cluster.run(self._name, _RUN, (sent,), Kept(1000), Kept(1000))

    async def _why(self, cluster: Cluster) -> str:
        """Why no command can run, if the pod is over."""
        found = None
        with contextlib.suppress(SandboxError):
            found = await cluster.pod(self._name)
            if found is None:
                return "the sandbox's pod was removed"
        if found is None or found.status.phase == "Running":
            return ""
        if found.status.reason == "DeadlineExceeded":
            return "the sandbox reached its lifetime_seconds and was closed"
        return f"the sandbox's pod ended: {found.status.reason or _waits_for(found) or found.status.phase}"

    def _live(self) -> Cluster:
        if self._cluster is None:
            raise SandboxError("the sandbox is closed")
        return self._cluster

    # ------------------------------------------------------------ ends

    async def end_processes(self) -> None:
        await self._end_all(self._live())

    async def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        name, self._name = self._name, ""
        if cluster is None:
            return
        try:
            if name:
                await cluster.delete(name)
        finally:
            await cluster.close()

    def kill(self) -> None:
        with contextlib.suppress(SandboxError, TimeoutError):  # the pod's own deadline ends it
            run_on_host(self.close(), END_S)


def _check_settings(settings: SandboxSettings) -> None:
    if not settings.image:
        raise SandboxError("sandbox kind kubernetes needs an image, for example image: python:3.11-slim")
    if settings.network == "gateway":
        raise SandboxError("sandbox network: gateway is not there for kind kubernetes: choose none or host")
    if settings.read_only:
        raise SandboxError("sandbox read_only: a pod can't see folders of this machine: put them into the image")
    if settings.writable != (WORKSPACE,):
        raise SandboxError(f"sandbox workspace: a pod's is {WORKSPACE}: choose bubblewrap, docker or podman")
    PodOptions.of(settings)


def _waits_for(found: Any) -> str:
    """What a pod that doesn't run is waiting for, in the cluster's words."""
    for each in found.status.container_statuses or []:
        state = each.state.waiting or each.state.terminated
        if state is not None and state.reason:
            return f"{state.reason}: {state.message or ''}".rstrip(": ")
    for condition in found.status.conditions or []:
        if condition.status == "False" and condition.message:
            return f"{condition.reason}: {condition.message}"
    return ""
