"""Before a run on Ray: whether this machine can do it, and where its Ray comes from.

Ray is a private one (the default), one that is already running, or a cluster described by environment variables.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ajet.backbone.plan import installed, requirement, version_range
from ajet.schema.errors import MissingDependencyError, UserError
from ajet.schema.install import install_command
from ajet.system.processes import RAY_RUN, end_all, ending_with_us, output_of
from ajet.system.services import answers

if TYPE_CHECKING:
    from ajet.backbone import LaunchOptions
    from ajet.backbone.ray.facts import Machine  # imports what a run needs, and `checked_address` has no run

T = TypeVar("T")

FLAG = "--ray-address"
VARIABLE = "RAY_ADDRESS"
ELSEWHERE = ("auto", "local")
"""Words instead of addresses, for which Ray finds one of this machine, or starts one."""
CLIENT = "ray://"
ANSWER_S = 10.0


def checked_address(given: str | None) -> str:
    """The address for `ray.init`: the given one, or RAY_ADDRESS, or else `auto`. Raises a `UserError`."""
    address = given or os.environ.get(VARIABLE) or "auto"
    if address in ELSEWHERE:
        return address
    name = FLAG if given else VARIABLE
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{name}: {address!r} is no address of a Ray cluster: it looks like head:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise UserError(
            f"{name}: no Ray answers at {address} ({error.strerror or error})\n"
            "    `ray status` on the cluster's head shows whether it runs; this machine must reach its port"
        ) from None
    return address


CPU_LOGICAL_CORES = 8
"""verl's actors ask for more logical cores than a laptop has; they share the real ones."""
CPU_OBJECT_STORE = 300_000_000
"""Bytes: enough for the weights of a small model, and little of a laptop's memory."""
DEFAULT_PORT = 6379
JOIN_DEADLINE_S = 600.0
LOOK_S = 2.0
"""Seconds between a worker machine's looks at the head."""
RAY_STARTS = 3
SLOW_START = "node timed out during startup"
USED_SHARE = 0.1
"""A GPU with more of its memory in use serves something else: engines take what they are told to, and fail late."""


class NoGpuError(UserError):
    """A run on GPUs was asked for where there are none."""


PLATFORM = "AJET_PLATFORM"
"""Environment variable: `cpu` for a small run without GPUs, with verl and Trinity alike."""


def require_library(package: str, extra: str) -> None:
    """Raise, with the command that installs it, if the library is missing, or another backbone's environment has it in
    a version that we don't work with."""
    wanted, found = requirement(package), installed(package)
    if found is None or find_spec("ray") is None:
        reason = f"{package}, which is not installed"
    elif not wanted.specifier.contains(found, prereleases=True):
        reason = f"{package} {version_range(wanted)}, and {found} is installed"
    else:
        return
    raise MissingDependencyError(
        f"the {extra} backbone needs {reason}\n    {install_command(extra)}   (in an environment of its own)"
    )


def detect_machine(backbone: str, *, logical_gpus: int = 1) -> Machine:
    """GPUs, or the CPU where the environment variable says so."""
    from ajet.backbone.ray.facts import Machine

    if on_cpu():
        return Machine("cpu", flash_attention=False, logical_gpus=logical_gpus)
    import torch

    if not torch.cuda.is_available():
        raise NoGpuError(
            f"the {backbone} backbone found no GPU on this machine\n"
            f"    for a small run on the CPU, set the environment variable {PLATFORM}=cpu"
        )
    return Machine("cuda", flash_attention=find_spec("flash_attn") is not None)


def planned_machine() -> Machine:
    """What a config is meant for: the CPU where the environment variable says so, else GPUs, here or elsewhere."""
    from ajet.backbone.ray.facts import Machine

    return Machine("cpu" if on_cpu() else "cuda")


def on_cpu() -> bool:
    """Whether the environment variable asks for a run without GPUs."""
    return os.environ.get(PLATFORM, "").strip().lower() == "cpu"


def check_gpus(needed: int, *, skip_memory: bool) -> None:
    """Raise, naming them, if GPUs are missing or in use. Without nvidia-smi nothing is checked."""
    gpus = read_gpus()
    if gpus is None:
        return
    if len(gpus) < needed:
        raise UserError(
            f"ajet.trainer_common.n_gpus_per_node: {needed}, but nvidia-smi finds {len(gpus)} here\n"
            f"    set it to {len(gpus)}"
        )
    busy = [gpu for gpu in gpus[:needed] if gpu.used > USED_SHARE * gpu.total]
    if busy and not skip_memory:
        named = ", ".join(f"GPU {gpu.number} ({gpu.used} of {gpu.total} MiB)" for gpu in busy)
        raise UserError(
            f"GPU memory is already in use: {named}\n"
            "    end what uses it (nvidia-smi names it), or go on regardless with --skip-check-avail-gpu"
        )


class GpuMemory(NamedTuple):
    """One GPU, in MiB."""

    number: int
    used: int
    total: int


def read_gpus() -> list[GpuMemory] | None:
    """What nvidia-smi reports; None without it."""
    query = ("nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits")
    printed = output_of(*query, within_s=20)
    return None if printed is None else [GpuMemory(*map(int, line.split(","))) for line in printed.splitlines()]


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """This machine's place in a cluster, from the environment."""

    head: str
    port: int
    rank: int
    nodes: int

    @property
    def address(self) -> str:
        return f"{self.head}:{self.port}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ClusterPlace:
        """`MASTER_ADDR`, `MASTER_PORT` (or `RAY_PORT`), `NODE_RANK` or `RANK`, `NNODES` or `WORLD_SIZE`."""
        missing = [
            " or ".join(names)
            for names in (("MASTER_ADDR",), ("NODE_RANK", "RANK"), ("NNODES", "WORLD_SIZE"))
            if not any(environment.get(name) for name in names)
        ]
        if missing:
            raise UserError(
                f"--with-ray-cluster: set {', '.join(missing)}\n"
                "    on every machine: MASTER_ADDR=<the first machine> NNODES=<their number> NODE_RANK=<0, 1, …>"
            )
        try:
            return cls(
                head=environment["MASTER_ADDR"],
                port=int(environment.get("RAY_PORT") or environment.get("MASTER_PORT") or DEFAULT_PORT),
                rank=int(environment.get("NODE_RANK") or environment["RANK"]),
                nodes=int(environment.get("NNODES") or environment["WORLD_SIZE"]),
            )
        except (KeyError, ValueError) as error:
            raise UserError(
                f"--with-ray-cluster: the ports, ranks and counts must be whole numbers ({error})"
            ) from None


@contextmanager
def ray_settings(
    options: LaunchOptions,
    place: ClusterPlace | None,
    scratch: Path,
    machine: Machine,
    environment: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """Arguments of `ray.init` for this run; what was started for it ends with the block."""
    if place is not None:
        with cluster_head(place, scratch, machine, environment) as address:
            yield {"address": address}
    elif options.ray_address:
        yield {"address": checked_address(options.ray_address)}
    else:
        yield private(scratch, machine)


def ray_environment(given: Mapping[str, str], *, shared: bool) -> dict[str, str]:
    """The environment of everything that uses this run's Ray. `shared`: other machines or programs use it too."""
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        # processes that may never be used; each takes minutes to import on a small machine
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_register_timeout_seconds": "300",
    }
    if "RAY_AUTH_MODE" in given:
        return environment
    if not shared:  # a token for this run alone; none is written into the user's home
        return environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    # every machine must have the same: RAY_AUTH_TOKEN is used if it is set on all of them
    return environment | {"RAY_AUTH_MODE": "token" if given.get("RAY_AUTH_TOKEN") else "disabled"}


def private(scratch: Path, machine: Machine) -> dict[str, Any]:
    """A Ray for this run alone, its files in the run's private folder."""
    settings = {"address": "local", "_temp_dir": str(scratch / "r"), "include_dashboard": False}
    return settings | {key.replace("-", "_"): value for key, value in _resources(machine).items()}


def retry_slow_start(start: Callable[[], T]) -> T:
    """Start Ray, again if its daemons were too slow: it allows them 30 s, which a machine under load can exceed."""
    import ray

    for _ in range(RAY_STARTS - 1):
        try:
            return start()
        except Exception as error:
            if SLOW_START not in str(error):
                raise
            ray.shutdown()
    return start()


def wait_for_nodes(nodes: int) -> None:
    """Return when this many machines have joined the cluster that this process is connected to."""
    import ray

    until = time.monotonic() + JOIN_DEADLINE_S
    while (joined := sum(bool(node["Alive"]) for node in ray.nodes())) < nodes:
        if time.monotonic() > until:
            raise TimeoutError(f"{joined} of {nodes} machines joined the cluster within {JOIN_DEADLINE_S:.0f} s")
        time.sleep(1)


@contextmanager
def cluster_head(place: ClusterPlace, scratch: Path, machine: Machine, environment: Mapping[str, str]) -> Iterator[str]:
    options = {
        "port": place.port,
        "node-ip-address": place.head,
        "temp-dir": scratch / "r",
        "include-dashboard": "false",
        **_resources(machine),
    }
    with _block(["--head", *(f"--{key}={value}" for key, value in options.items())], environment) as process:
        wait_for_port(place.head, place.port, JOIN_DEADLINE_S, what="Ray's head", process=process)
        yield place.address


def serve_as_worker(place: ClusterPlace, machine: Machine, environment: Mapping[str, str]) -> int:
    """Join the head, and serve it until it ends."""
    wait_for_port(place.head, place.port, JOIN_DEADLINE_S, what=f"the head {place.address}")
    options = {"address": place.address, **_resources(machine)}
    with _block([f"--{key}={value}" for key, value in options.items()], environment) as process:
        while answers((place.head, place.port), timeout_s=10.0):
            _check_started(process)
            time.sleep(LOOK_S)
    return 0


def _check_started(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise UserError(
            f"--with-ray-cluster: `ray start` ended with exit code {process.returncode}: what it said is above"
        )


def _resources(machine: Machine) -> dict[str, Any]:
    if not machine.cpu:
        return {}
    # the GPUs are bookkeeping: verl and Trinity place their workers by them
    return {"num-cpus": CPU_LOGICAL_CORES, "num-gpus": machine.logical_gpus, "object-store-memory": CPU_OBJECT_STORE}


def wait_for_port(
    host: str, port: int, deadline_s: float, *, what: str, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Return when something listens there; raise if nothing does in time, or if the process that should has ended."""
    until = time.monotonic() + deadline_s
    while not answers((host, port)):
        if process is not None:
            _check_started(process)
        if time.monotonic() > until:
            raise UserError(
                f"--with-ray-cluster: {what} at {host}:{port} did not answer within {deadline_s:.0f} s\n"
                "    is MASTER_ADDR right on every machine, and the port open between them?"
            )
        time.sleep(0.5)


@contextmanager
def _block(arguments: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start --block`, ended with the block, and by the kernel if this process is killed."""
    ray = str(Path(sys.executable).with_name("ray"))
    process = subprocess.Popen(
        ending_with_us([ray, "start", "--block", *arguments]),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # it ends Ray's other processes in order, and hangs if their head is gone before
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        end_all(RAY_RUN, environment[RAY_RUN], session=process.pid)
        process.wait()
