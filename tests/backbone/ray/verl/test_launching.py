"""What surrounds verl: its log's last error, its metrics' names, GPUs, clusters by environment, ending processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ajet.backbone.ray.child import remove_abandoned
from ajet.backbone.ray.child_log import LEFT_OUT, ChildLog
from ajet.backbone.ray.failure import last_error
from ajet.backbone.ray.metrics_tail import MetricsTail
from ajet.backbone.ray.payload import RunPayload
from ajet.backbone.ray.processes import MARK, end_all, of_run
from ajet.backbone.ray.ray_start import ClusterPlace, wait_for_port
from ajet.backbone.ray.verl.gpu_check import busy_gpus, parse_gpus
from ajet.backbone.ray.verl.verl_metrics import translate
from ajet.config import make_config
from ajet.schema.errors import UserError

RAY_LOG = """\
\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m Training Progress:   0%|          | 0/3
Traceback (most recent call last):
  File "main_ppo.py", line 155, in run
ray.exceptions.RayTaskError(RuntimeError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=77, ip=10.0.0.1)
RuntimeError: episode worker 0 died: The actor died unexpectedly
\x1b[36m(TaskRunnerV1 pid=77)\x1b[0m Training Progress:   0%|          | 0/3
"""


def test_the_last_error_is_the_cause_and_not_rays_wrapping(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text(RAY_LOG)
    assert last_error(log) == "RuntimeError: episode worker 0 died: The actor died unexpectedly"


def test_a_plain_exception_is_found(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text("Traceback (most recent call last):\n    raise Exception(\nException: The current node timed out.\n")
    assert last_error(log) == "Exception: The current node timed out."


def test_a_dead_actor_is_named(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text(
        "ray.exceptions.ActorDiedError: The actor died.\n\tclass_name: WorkerDict\n\tactor_id: 1\n\tpid: 7\n"
    )
    assert last_error(log) == "ray.exceptions.ActorDiedError: The actor died. (WorkerDict)"


def test_a_log_without_an_error_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_text("one\n\ntwo\n")
    assert last_error(log) == "one\ntwo"
    assert last_error(tmp_path / "none") == "it wrote nothing"


def test_verls_metrics_get_our_names() -> None:
    given = {"actor/grad_norm": 0.5, "timing_s/gen": 2, "reward/mean": 0.25, "critic/score/mean": 9.0, "note": "text"}
    assert translate(given) == {
        "train/grad_norm": 0.5,
        "time/rollout": 2.0,
        "reward/mean": 0.25,
        "verl/critic/score/mean": 9.0,
    }


def test_a_metrics_line_counts_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path, translate)
    assert list(tail) == []
    line = json.dumps({"step": 1, "data": {"reward/mean": 1.0}})
    path.write_text(line[:10])
    assert list(tail) == []
    path.write_text(line + "\n" + line[:5])
    assert list(tail) == [(1, {"reward/mean": 1.0})]
    assert list(tail) == []


def test_a_gpu_in_use_is_found() -> None:
    gpus = parse_gpus("0, 4, 81559\n1, 40000, 81559\n")
    assert [gpu.index for gpu in busy_gpus(gpus)] == [1]


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


def test_a_killed_launchers_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"ajv{ended.pid}_a", f"ajv{os.getpid()}_b", "ajvother"):
        (tmp_path / name).mkdir()
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"ajv{os.getpid()}_b", "ajvother"])


def test_everything_marked_is_ended_orphans_too() -> None:
    """The child starts a grandchild in a session of its own, which ignores SIGTERM, and goes."""
    mark = f"test-{os.getpid()}"
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, MARK: mark}, check=True, stdout=subprocess.DEVNULL)
    assert len(of_run(mark)) == 1
    time.sleep(0.3)
    end_all(mark, patience_s=0.5)
    assert of_run(mark) == []


def test_a_process_that_lost_its_mark_is_found_in_its_session() -> None:
    """As Ray's agents do, which write their title over it. Its parent has gone already."""
    mark = f"test-{os.getpid()}"
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], env={})"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: mark}, start_new_session=True)
    parent.wait()
    assert of_run(mark) == []
    assert len(of_run(mark, parent.pid)) == 1
    assert end_all(mark, session=parent.pid) == 1
    assert of_run(mark, parent.pid) == []


def test_the_childs_log_holds_neither_secrets_nor_the_payload(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print('key sk-secret'); print({'ajet_run': 'PAYLOAD'})"], stdout=subprocess.PIPE
    )
    log = ChildLog(child, tmp_path / "log", payload="PAYLOAD", mask=lambda text: text.replace("sk-secret", "***"))
    child.wait()
    log.finish()
    assert (tmp_path / "log").read_text() == f"key ***\n{{'ajet_run': '{LEFT_OUT}'}}\n"


def test_a_run_crosses_processes_unchanged(tmp_path: Path) -> None:
    config = make_config(
        {"rollout.num_repeat": 3, "user": {"text": "${not.an.interpolation}"}}, frozen_lake={"size": 4}
    )
    sent = RunPayload(config.model_dump(mode="json"), str(tmp_path), "/x/y.yaml", "/models/m", total_steps=7)
    got = RunPayload.decode(sent.encode())
    loaded = got.load_config()
    assert got == sent
    assert "$" not in sent.encode()
    assert loaded.ajet.rollout.num_repeat == 3
    assert loaded.frozen_lake.size == 4
    assert loaded.ajet.user.text == "${not.an.interpolation}"
    assert (loaded.ajet.model.path, str(loaded.yaml_path)) == ("/models/m", "/x/y.yaml")
