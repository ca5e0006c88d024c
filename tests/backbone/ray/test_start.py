"""Before a run on Ray: GPUs, and clusters described by environment variables."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ajet.backbone.ray import start
from ajet.backbone.ray.facts import Machine
from ajet.backbone.ray.start import (
    ClusterPlace,
    check_gpus,
    checked_address,
    require_library,
    wait_for_port,
)
from ajet.schema.errors import MissingDependencyError, UserError
from ajet.system.processes import RAY_RUN
from support.waiting import wait_until


def test_gpus_that_are_missing_or_in_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "output_of", lambda *command, within_s: "0, 4, 81559\n1, 40000, 81559")
    check_gpus(1, skip_memory=False)
    with pytest.raises(UserError, match=r"already in use: GPU 1 \(40000 of 81559 MiB\)\n"):
        check_gpus(2, skip_memory=False)
    check_gpus(2, skip_memory=True)
    with pytest.raises(UserError, match=r"n_gpus_per_node: 4, .*\n    set it to 2"):
        check_gpus(4, skip_memory=True)


@pytest.mark.parametrize(
    ("found", "named"), [(None, "verl, which is not installed"), ("0.8.0", r"verl >=.*, and 0\.8\.0 is installed")]
)
def test_a_library_in_another_version_is_refused_like_one_that_is_missing(
    found: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trinity's environment has a verl, too, in which a run would end after a minute, for want of some module."""
    monkeypatch.setattr(start, "installed", lambda package: found)
    monkeypatch.setattr(start, "find_spec", lambda module: module)
    with pytest.raises(MissingDependencyError, match=named):
        require_library("verl", "verl")


def test_a_cluster_place_comes_from_the_environment() -> None:
    place = ClusterPlace.from_environment({"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1", "NNODES": "2"})
    assert (place.address, place.rank, place.nodes) == ("10.0.0.1:6379", 1, 2)
    same = ClusterPlace.from_environment(
        {"MASTER_ADDR": "h", "MASTER_PORT": "7000", "RANK": "0", "WORLD_SIZE": "4"},
    )
    assert (same.address, same.rank, same.nodes) == ("h:7000", 0, 4)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, "MASTER_ADDR, NODE_RANK or RANK, NNODES or WORLD_SIZE"),
        ({"MASTER_ADDR": "h", "NODE_RANK": "one", "NNODES": "2"}, "whole numbers"),
    ],
)
def test_a_cluster_place_that_is_incomplete_says_what_to_set(environment: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        ClusterPlace.from_environment(environment)


def test_waiting_for_the_head_ends_with_a_clear_message() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError, match="MASTER_ADDR right"):
        wait_for_port("127.0.0.1", port, 0.1, what="the head")
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for_port("127.0.0.1", server.getsockname()[1], 5, what="the head")


def put_in_rays_place(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "ray").write_text(f"#!/bin/sh\n{script}")
    (folder / "ray").chmod(0o755)
    ending_with_us = start.ending_with_us
    monkeypatch.setattr(start, "ending_with_us", lambda command: ending_with_us([str(folder / "ray"), *command[1:]]))


ENDS_ITS_OWN = """
(trap 'echo own >> {log}; exit' TERM; touch {log}; while :; do sleep 0.05; done) & own=$!
trap 'sleep 0.3; echo ray >> {log}; kill $own; wait $own; exit' TERM
until [ -e {log} ]; do sleep 0.05; done
touch {ready}
wait
"""


def test_ray_is_asked_to_end_before_the_processes_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says goodbye to its head, and waits for the answer of one that is gone."""
    log, ready = tmp_path / "log", tmp_path / "ready"
    put_in_rays_place(ENDS_ITS_OWN.format(log=log, ready=ready), tmp_path, monkeypatch)
    environment = {RAY_RUN: "mark-of-rays-end", "PATH": os.environ["PATH"]}
    with socket.create_server(("127.0.0.1", 0)) as head:
        place = ClusterPlace("127.0.0.1", head.getsockname()[1], rank=0, nodes=1)
        with start.cluster_head(place, tmp_path, Machine("cpu"), environment):
            wait_until(ready.exists)
    assert log.read_text().split() == ["ray", "own"]


def test_a_ray_that_does_not_start_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a MASTER_PORT among those that Ray gives its workers."""
    put_in_rays_place("exit 3\n", tmp_path, monkeypatch)
    environment = {RAY_RUN: "mark-of-this-test"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = ClusterPlace("127.0.0.1", free.getsockname()[1], rank=0, nodes=2)
    with (
        pytest.raises(UserError, match="`ray start` ended with exit code 3"),
        start.cluster_head(nobody, tmp_path, Machine("cpu"), environment),
    ):
        pass
    with socket.create_server(("127.0.0.1", 0)) as head:
        place = ClusterPlace("127.0.0.1", head.getsockname()[1], rank=1, nodes=2)
        with pytest.raises(UserError, match="`ray start` ended with exit code 3"):
            start.serve_as_worker(place, Machine("cpu"), environment)


def test_an_address_without_a_ray_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert checked_address(None) == "auto"
    for wrong in ("nonsense", "head", ":6379", "head:port", "head:0"):
        with pytest.raises(UserError, match=f"--ray-address: '{wrong}' is no address of a Ray cluster"):
            checked_address(wrong)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"127.0.0.1:{server.getsockname()[1]}"
        assert checked_address(here) == here
        assert checked_address(f"ray://{here}") == f"ray://{here}"
    monkeypatch.setenv("RAY_ADDRESS", here)
    with pytest.raises(UserError, match=f"RAY_ADDRESS: no Ray answers at {here} "):
        checked_address(None)
