"""Where a run's Ray comes from: a private one (default), one that runs already, or a cluster by environment."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.schema.errors import UserError

if TYPE_CHECKING:
    from ajet.backbone.options import LaunchOptions
    from ajet.backbone.verl.config_map import Machine

CPU_LOGICAL_CORES = 8
"""verl's actors ask for more logical cores than a laptop has; they share the real ones."""
CPU_OBJECT_STORE = 300_000_000
"""Bytes: enough for the weights of a small model, and little beside the memory of a laptop."""
DEFAULT_PORT = 6379
JOIN_DEADLINE_S = 600.0


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
                "    on every machine: MASTER_ADDR=<the first machine> NNODES=<how many> NODE_RANK=<0, 1, …>"
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
    options: LaunchOptions | None, place: ClusterPlace | None, scratch: Path, machine: Machine
) -> Iterator[dict[str, Any]]:
    """verl's `ray_kwargs` for this run; what was started for it ends with the block."""
    if place is not None:
        with cluster_head(place, scratch) as address:
            yield {"ray_kwargs.ray_init.address": address}
    elif options is not None and options.ray_address:
        yield {"ray_kwargs.ray_init.address": options.ray_address}
    else:
        yield private(scratch, machine)


def private(scratch: Path, machine: Machine) -> dict[str, Any]:
    """A Ray of this run's own, its files in the run's private folder."""
    place = "ray_kwargs.ray_init"
    settings: dict[str, Any] = {
        f"{place}.address": "local",
        f"{place}._temp_dir": str(scratch / "r"),
        f"{place}.include_dashboard": False,
    }
    if machine.cpu:
        settings |= {
            f"{place}.num_cpus": CPU_LOGICAL_CORES,
            f"{place}.num_gpus": 1,  # bookkeeping: verl places its workers by it
            f"{place}.object_store_memory": CPU_OBJECT_STORE,
        }
    return settings


@contextmanager
def cluster_head(place: ClusterPlace, scratch: Path) -> Iterator[str]:
    """Start Ray's head here, if this is the first machine."""
    options = {
        "port": place.port,
        "node-ip-address": place.head,
        "temp-dir": scratch / "r",
        "include-dashboard": "false",
    }
    command = [_ray(), "start", "--head", "--block", *(f"--{key}={value}" for key, value in options.items())]
    with _block(command):
        wait_for_port(place.head, place.port, JOIN_DEADLINE_S, what="Ray's head")
        yield place.address


def serve_as_worker(place: ClusterPlace) -> int:
    """Join the head and lend it this machine until it ends."""
    wait_for_port(place.head, place.port, JOIN_DEADLINE_S, what=f"the head {place.address}")
    command = [_ray(), "start", f"--address={place.address}", "--block"]
    with _block(command) as process:
        return process.wait()


def wait_for_port(host: str, port: int, deadline_s: float, *, what: str) -> None:
    """Return when somebody listens there; raise when nobody does in time."""
    until = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"--with-ray-cluster: {what} at {host}:{port} did not answer within {deadline_s:.0f} s ({error})\n"
                    "    is MASTER_ADDR right on every machine, and the port open between them?"
                ) from None
            time.sleep(0.5)


def _ray() -> str:
    return str(Path(sys.executable).with_name("ray"))


@contextmanager
def _block(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
